"""Explain why a collective failed: a lost or silent peer, or a wrong setting of this machine."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from trainer.devices import health
from trainer.errors import PeerError, SetupError, TrainerError, is_out_of_memory
from trainer.processes import interrupts, silence, stacks
from trainer.processes.terminal import escape_control_characters

if TYPE_CHECKING:
    import torch

# Substrings of NCCL errors which mean that a peer, or the connection to it, has failed. Other NCCL
# errors, such as CUDA errors and invalid calls, come from this rank.
NCCL_PEERS = (
    "ncclRemoteError",
    "ncclSystemError",
    "ncclInternalError",
    "timeout",
    "timed out",
    "aborted",
)
# Complete error messages of torch's stores when a peer does not answer.
STORES = ("Wait timeout", "Socket Timeout")
# Pattern of the position in gloo's source code with which its error messages begin.
PLACE = r"\[(enforce fail at )?\S*gloo/\S+:\d+\]"
# Prefix that torch adds to an error in the callback of a future, such as DDP's communication hook.
CALLBACK = "Got the following error when running the callback: RuntimeError: "
GLOO = re.compile(rf"({CALLBACK})?({PLACE}|Gloo connectFullMesh failed)")


class translate_peer_errors:
    """Context manager that translates errors of collectives.

    If a lost or silent peer caused an error, the error becomes a PeerError. If a setting of this
    machine caused it, the error becomes a SetupError. All other errors, including out-of-memory
    errors, are raised unchanged.
    """

    def __init__(self, patience: float | None = None) -> None:
        """Store the timeout of the block.

        Args:
            patience: seconds for which other ranks may be silent. None selects the `timeout` of the
                process group.
        """
        self._patience = patience

    def __enter__(self) -> Any:
        """Start the timeout, and return the module `torch.distributed`.

        The module is imported here, because a run with a single process does not need it.
        """
        import torch.distributed as dist

        self._wait = silence.begin_wait(self._patience, leave_silent_peers)
        return dist

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        waited = silence.end_wait(self._wait)
        if not isinstance(error, RuntimeError) or isinstance(error, TrainerError):
            return
        if is_out_of_memory(error):
            return
        import torch.distributed as dist

        setting = find_wrong_setting(error)
        if setting:
            raise SetupError(setting) from error
        if waited or is_broken_collective(error):
            line = describe_lost_peer(waited or error)
            # Stacks are dumped for silent peers only. If the group does not exist yet, a peer has
            # never joined, and the stacks of this rank would not show why.
            is_silent = waited or "time" in str(error).lower()
            if is_silent and dist.is_initialized():
                line += stacks.dump(line)
            raise PeerError(line) from error


def describe_lost_peer(cause: BaseException | float) -> str:
    """Return the message of a rank that cannot continue without a peer.

    Args:
        cause: error of a collective, or the timeout in seconds after which the peer was given up.
    """
    rank = os.environ.get("RANK", "0")
    line = f"rank {rank}: lost another rank (it died, or was silent for `timeout`): "
    if isinstance(cause, BaseException):
        return line + summary_line(cause)
    own_code = (
        "if your own data set, loss, metric or logger takes longer on one rank, raise timeout="
    )
    return f"{line}timed out after {1000 * cause:.0f} ms; {own_code}"


def leave_silent_peers(seconds: float) -> None:
    """Print that peers are silent, and end this process.

    A hanging collective neither returns nor raises, so an exception could not end the run.

    Args:
        seconds: timeout after which the peers were given up.
    """
    line = describe_lost_peer(seconds)
    print(f"trainer: {escape_control_characters(line + stacks.dump(line))}", file=sys.stderr)
    interrupts.exit_now(PeerError.code)


def is_broken_collective(error: BaseException) -> bool:
    """Return whether torch raised an error because a peer of a collective is gone or silent.

    Torch has classes for the errors of NCCL and of its stores. Errors of gloo are plain
    RuntimeErrors that begin with a position in gloo's source code. An error of the user's code may
    contain the same words, but not at the start.
    """
    import torch.distributed as dist

    text = str(error)
    if not isinstance(error, dist.DistError):
        return bool(GLOO.match(text)) or text in STORES
    return "NCCL error" not in text or any(sign in text for sign in NCCL_PEERS)


def find_wrong_setting(error: BaseException) -> str | None:
    """Return a message if a setting of this machine caused an error of a collective, else None."""
    import torch.distributed as dist

    text = str(error)
    is_nccl = isinstance(error, dist.DistError) and "nccl" in text.lower()
    if is_nccl and ("/dev/shm" in text or "shared memory segment" in text):
        return (
            f"/dev/shm is too small for NCCL ({describe_shared_memory()}): make it larger (docker "
            "run --shm-size=8g or --ipc=host; mount -o remount,size=8g /dev/shm), or set "
            "NCCL_SHM_DISABLE=1"
        )
    if is_nccl and "no socket interface found" in text:
        return _describe_interface("NCCL_SOCKET_IFNAME")
    if is_nccl and ("Duplicate GPU" in text or "using the same GPU" in text):
        return (
            "two ranks use one card, which NCCL cannot: start as many ranks as cards, or "
            "mode=local_sgd"
        )
    lacks_interface = "Unable to find address for" in text or "Unable to find interface for" in text
    if lacks_interface and GLOO.match(text):
        return _describe_interface("GLOO_SOCKET_IFNAME")
    return None


def explain_no_answer(cuda: bool, seconds: float) -> SetupError:
    """Return the error of ranks that have met at their store but receive nothing from each other.

    Args:
        cuda: whether the ranks use NCCL.
        seconds: timeout of the first exchange.
    """
    names = "GLOO_SOCKET_IFNAME"
    if cuda:
        names = (
            "NCCL_P2P_DISABLE=1 (cards that cannot reach each other); on several machines "
            "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        )
    return SetupError(
        f"the ranks met, but nothing came through between them within {seconds:g} s: set {names} "
        f"to the network interface that joins the machines, of {_list_interfaces()}"
    )


def _list_interfaces() -> str:
    import socket

    return ", ".join(name for _, name in socket.if_nameindex())


def _describe_interface(variable: str) -> str:
    """Return a message about a variable that selects a network interface."""
    here = _list_interfaces()
    chosen = os.environ.get(variable)
    if chosen is None:
        return (
            f"no network interface can be used ({here}): set {variable} to the one that leads to "
            "the other nodes"
        )
    return (
        f"{variable}={chosen[:40]} names no usable interface; this machine has {here}: set it to "
        "one, or unset it"
    )


def describe_shared_memory() -> str:
    """Return the size of /dev/shm and its free space in MiB, as text."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return "there is none"
    return f"{usage.total >> 20} MiB, {usage.free >> 20} free"


def summary_line(error: BaseException) -> str:
    """Return the most informative line of a collective's error.

    The line has at most 200 characters. The C++ stack, and the position in gloo's source code with
    which gloo's messages begin, are left out.
    """
    message = str(error).partition("Exception raised from")[0].strip()
    if not message:
        return type(error).__name__
    last_line = re.sub(PLACE, "", message.splitlines()[-1], count=1).strip()
    return last_line.partition(". This is typically")[0][:200]


def check_sums(device: torch.device, rank: int, size: int) -> None:
    """Check that all-reduce returns correct sums. Collective.

    Args:
        device: device of the tensors.
        rank: rank of this process.
        size: number of ranks.

    Raises:
        SetupError: the sum is wrong on this rank.
    """
    import torch
    import torch.distributed as dist

    # 8 KiB and 32 MiB, because NCCL sends short and long messages by different protocols.
    for count in (1 << 10, 1 << 22):
        numbers = torch.arange(count, dtype=torch.int64)
        sums = (numbers * (rank + 1) + rank).to(device)
        dist.all_reduce(sums)
        expected = numbers * (size * (size + 1) // 2) + size * (size - 1) // 2
        if not torch.equal(sums.cpu(), expected):
            raise SetupError(
                f"rank {rank}: a sum of {count} numbers over all ranks was wrong: set "
                "NCCL_P2P_DISABLE=1 (and NCCL_SHM_DISABLE=1 if that is not enough), or switch the "
                "IOMMU or PCIe ACS off and update the driver"
            )


def check_devices(devices: Iterable[torch.device], rank: int, size: int, seconds: float) -> None:
    """Wait until the devices of a rank have completed their work.

    Args:
        devices: devices of this rank.
        rank: rank of this process.
        size: number of ranks.
        seconds: timeout in seconds.

    Raises:
        PeerError: a device did not complete its work in time. The process then exits without
            Python's shutdown.
    """
    hung = health.find_unfinished(dict.fromkeys(devices), seconds)
    if hung is None:
        return
    # Python's own shutdown would wait for the device, so it is skipped when the process exits.
    interrupts.skips_shutdown.set()
    if size > 1:
        line = f"rank {rank}: {hung} has hung, or waits for another rank's"
    else:
        line = f"{hung} has hung"
    line += (
        f": its work has not ended within timeout={seconds:g} seconds; nvidia-smi and dmesg (Xid) "
        "show whether the GPU has failed"
    )
    raise PeerError(line + stacks.dump(line))

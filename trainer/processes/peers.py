"""What an error raised by a collective means: a peer that is gone or silent, this machine's settings, or neither."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from trainer.devices import health
from trainer.errors import PeerError, SetupError, TrainerError, is_out_of_memory
from trainer.processes import interrupts, silence, stacks
from trainer.processes.terminal import plain

if TYPE_CHECKING:
    import torch

# Of NCCL's own kinds, those that a peer or the way to it causes. Others (of CUDA, of usage) are this rank's own.
NCCL_PEERS = ("ncclRemoteError", "ncclSystemError", "ncclInternalError", "timeout", "timed out", "aborted")
STORES = ("Wait timeout", "Socket Timeout")  # all that torch's stores say
PLACE = r"\[(enforce fail at )?\S*gloo/\S+:\d+\]"  # in gloo's source
CALLBACK = "Got the following error when running the callback: RuntimeError: "  # of a future, as DDP's hooks have it
GLOO = re.compile(rf"({CALLBACK})?({PLACE}|Gloo connectFullMesh failed)")


class lost_peers:
    """Turn what a collective raises when a peer is gone or silent into a PeerError, and what it raises where this
    machine's settings are at fault into a SetupError. Everything else passes, and out of memory before all."""

    def __init__(self, patience: float | None = None) -> None:
        """`patience`: seconds for which others may be silent, where it is not the group's `timeout`."""
        self._patience = patience

    def __enter__(self) -> Any:
        """Gives `torch.distributed`, which is not imported before."""
        import torch.distributed as dist

        self._wait = silence.begin(self._patience, leave_silent_peers)
        return dist

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        waited = silence.end(self._wait)
        if not isinstance(error, RuntimeError) or isinstance(error, TrainerError) or is_out_of_memory(error):
            return
        import torch.distributed as dist

        setting = wrong_setting(error)
        if setting is not None:
            raise SetupError(setting) from error
        if waited or is_broken_collective(error):
            line = lost(waited or error)
            # A peer that never came left no trace here.
            silent = (waited or "time" in str(error).lower()) and dist.is_initialized()
            raise PeerError(line + (stacks.dump(line) if silent else "")) from error


def lost(cause: BaseException | float) -> str:
    """The line of a rank that cannot go on without another, for an error, or after so many seconds of silence."""
    rank = os.environ.get("RANK", "0")
    told = summary_line(cause) if isinstance(cause, BaseException) else f"timed out after {1000 * cause:.0f} ms"
    return f"rank {rank}: lost another rank (it died, or was silent for `timeout`): {told}"


def leave_silent_peers(seconds: float) -> None:
    """End this process, where a collective neither ends nor raises after so many seconds of silence."""
    line = lost(seconds)
    print(f"trainer: {plain(line + stacks.dump(line))}", file=sys.stderr)
    interrupts.exit_now(PeerError.code)


def is_broken_collective(error: BaseException) -> bool:
    """Whether torch raised this because a peer of a collective is gone or silent.

    Torch has classes for NCCL's and its stores' errors; gloo's are plain RuntimeErrors that begin with a place in its
    source. The mere words may stand in a user's own error.
    """
    import torch.distributed as dist

    text = str(error)
    if not isinstance(error, getattr(dist, "DistError", ())):
        return bool(GLOO.match(text)) or text in STORES
    return "NCCL error" not in text or any(sign in text for sign in NCCL_PEERS)


def wrong_setting(error: BaseException) -> str | None:
    """One line where the machine's settings are at fault: what was found and what to type."""
    import torch.distributed as dist

    text = str(error)
    nccl = isinstance(error, getattr(dist, "DistError", ())) and "nccl" in text.lower()
    if nccl and ("/dev/shm" in text or "shared memory segment" in text):
        return (
            f"/dev/shm is too small for NCCL ({shared_memory()}): make it larger (docker run --shm-size=8g or "
            "--ipc=host; mount -o remount,size=8g /dev/shm), or set NCCL_SHM_DISABLE=1"
        )
    if nccl and "no socket interface found" in text:
        return _interface("NCCL_SOCKET_IFNAME")
    if nccl and "Duplicate GPU" in text:
        return "two ranks use one card, which NCCL cannot: start as many ranks as cards, or mode=local_sgd"
    if GLOO.match(text) and ("Unable to find address for" in text or "Unable to find interface for" in text):
        return _interface("GLOO_SOCKET_IFNAME")
    return None


def no_way(cuda: bool, seconds: float) -> SetupError:
    """The ranks have met at their store, and nothing comes through between them."""
    names = "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME" if cuda else "GLOO_SOCKET_IFNAME"
    return SetupError(
        f"the ranks met, but nothing came through between them within {seconds:g} s: set "
        f"{'NCCL_P2P_DISABLE=1 (cards that cannot reach each other); on several machines ' * cuda}{names} to the "
        f"network interface that joins the machines, of {_interfaces()}"
    )


def _interfaces() -> str:
    import socket

    return ", ".join(name for _, name in socket.if_nameindex())


def _interface(variable: str) -> str:
    here, chosen = _interfaces(), os.environ.get(variable)
    if chosen is None:
        return f"no network interface can be used ({here}): set {variable} to the one that leads to the other nodes"
    return f"{variable}={chosen[:40]} names no usable interface; this machine has {here}: set it to one, or unset it"


def shared_memory() -> str:
    """The size of /dev/shm and what is free of it, in MiB."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return "there is none"
    size, free = (status.f_frsize * blocks >> 20 for blocks in (status.f_blocks, status.f_bavail))
    return f"{size} MiB, {free} free"


def summary_line(error: BaseException) -> str:
    """The most informative line of a collective's error, without the place in gloo's source or C++'s stack."""
    lines = [line.strip() for line in str(error).partition("Exception raised from")[0].splitlines()]
    lines = [re.sub(PLACE, "", line, count=1).strip() for line in lines if line]
    return lines[-1].partition(". This is typically")[0][:200] if lines else type(error).__name__


def check_sums(device: torch.device, rank: int, size: int) -> None:
    """All-reduce a known pattern. Raises SetupError where the sum is wrong on this rank."""
    import torch
    import torch.distributed as dist

    numbers = torch.arange(1 << 18, dtype=torch.int64)
    sums = (numbers * (rank + 1) + rank).to(device)
    dist.all_reduce(sums)
    if not torch.equal(sums.cpu(), numbers * (size * (size + 1) // 2) + size * (size - 1) // 2):
        raise SetupError(
            f"rank {rank}: a sum over all ranks were wrong: set NCCL_P2P_DISABLE=1 (and NCCL_SHM_DISABLE=1 if that "
            "is not enough), or switch the IOMMU or PCIe ACS off and update the driver"
        )


def check_devices(devices: Iterable[torch.device], rank: int, size: int, seconds: float) -> None:
    """Wait until a rank's devices have done what they were given. Raises PeerError after so many seconds."""
    hung = health.unfinished(dict.fromkeys(devices), seconds)
    if hung is None:
        return
    interrupts.stuck.set()  # Python's own end would wait for it
    line = f"rank {rank}: {hung} has hung, or waits for another rank's" if size > 1 else f"{hung} has hung"
    line += f": what it was given has not ended within timeout={seconds:g} seconds; nvidia-smi and dmesg (Xid) tell "
    line += "whether the card has failed"
    raise PeerError(line + stacks.dump(line))

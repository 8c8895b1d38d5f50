"""Meaning of a collective's error, by the texts of gloo, NCCL and torch's stores."""

from __future__ import annotations

import re
import socket
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.simulated.simcuda import simulated
from trainer.distributed import peers
from trainer.distributed.world import World
from trainer.errors import PeerError, SetupError, explain
from trainer.processes import interrupts, stacks
from trainer.processes.rank import Place
from trainer.training.rank_sync import RankSync

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
CALLBACK = (
    # The error of a DDP hook's future.
    "Got the following error when running the callback: RuntimeError: "
)
CLOSED = "Connection closed by peer [127.0.0.1]:4771"
RESET = "Read error: Connection reset by peer. At: /x/hooks.py(77)"
SILENT = "Timed out waiting 4000ms for recv operation to complete"
NCCL = (
    "NCCL error in: "
    "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled error, NCCL version 2.30.7\n"
)


def outcome(error):
    """Return the result of an error inside a collective: its exit code, our line or its traceback,
    and the exception.
    """
    try:
        with peers.translate_peer_errors():
            raise error
    except Exception as found:
        line, code = explain(found)
        return code, line, found


@pytest.mark.parametrize(
    ("error", "tells"),
    [
        (RuntimeError(f"{GLOO}pair.cc:561] {CLOSED}. This is typically caused by"), CLOSED),
        (RuntimeError(f"{CALLBACK}{GLOO}pair.cc:545] {RESET}"), RESET),
        (RuntimeError(f"{GLOO}unbound_buffer.cc:78] {SILENT}"), SILENT),
        (
            RuntimeError("Gloo connectFullMesh failed with timeout"),
            "Gloo connectFullMesh failed with timeout",
        ),
        (RuntimeError("Wait timeout"), "Wait timeout"),
        (dist.DistStoreError("wait timeout after 3000ms, keys: /x"), "keys: /x"),
        (
            dist.DistNetworkError(
                "The client socket has timed out\nException raised from poll\nframe #0"
            ),
            "timed out",
        ),
        (
            dist.DistBackendError(
                f"{NCCL}ncclRemoteError: A call failed\nLast error:\nsocket closed"
            ),
            "socket closed",
        ),
        (
            dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL(1)"),
            "WorkNCCL(1)",
        ),
    ],
)
def test_a_lost_peer(error, tells, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    code, line, actual = outcome(error)
    assert code == 7
    assert re.match("rank 3: .*`timeout`", line)
    assert line.endswith(tells)
    assert actual.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("timeout while reading shard 3"),
        RuntimeError("my nccl wrapper: timed out"),
        RuntimeError("the gloo of this image is too bright"),
        RuntimeError("connection reset by my database"),
        dist.DistBackendError(
            f"{NCCL}ncclUnhandledCudaError: Call to CUDA function failed.\n\nillegal access"
        ),
        dist.DistBackendError(f"{NCCL}ncclInvalidUsage: This usually reflects invalid usage"),
    ],
)
def test_an_error_of_the_users_code_keeps_its_traceback(error):
    code, line, actual = outcome(error)
    assert (code, actual) == (1, error) and line.startswith("Traceback")


def test_out_of_memory_comes_first():
    full = (
        f"{NCCL}ncclUnhandledCudaError: Call to CUDA function failed.\nLast "
        "error:\nCuda failure 2 'out of memory'"
    )
    assert outcome(dist.DistBackendError(full))[0] == 6
    assert outcome(RuntimeError("CUDA out of memory while waiting for nccl"))[0] == 6
    host = (
        f"{NCCL}ncclSystemError: System call failed.\nLast error:\nmmap failed: "
        "Cannot allocate memory"
    )
    assert outcome(dist.DistBackendError(host))[0] == 6


NO_ROOM = (
    "Error while creating shared memory segment /dev/shm/nccl-Wq4z (size "
    "9637888), error: No space left on device"
)
NO_WAY = (
    f"[enforce fail at {GLOO[1:]}device.cc:84] ifa != nullptr. Unable to find address for: eth7"
)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            dist.DistBackendError(
                f"{NCCL}ncclSystemError: System call failed.\nLast error:\n{NO_ROOM} (28)"
            ),
            ["/dev/shm ", " NCCL (", "MiB", "--shm-size=8g", "NCCL_SHM_DISABLE=1"],
        ),
        (
            dist.DistBackendError(
                f"{NCCL}ncclInvalidUsage\nLast error:\nBootstrap : no socket interface found"
            ),
            ["NCCL_SOCKET_IFNAME=eth7 ", " lo:"],
        ),
        (
            dist.DistBackendError(
                f"{NCCL}ncclInvalidUsage\nLast error:\nDuplicate GPU detected : rank 0 and rank 1"
            ),
            ["NCCL", "mode=local_sgd"],
        ),
        (
            dist.DistBackendError(
                f"{NCCL}ncclInvalidUsage\nLast error:\nMultiple Ranks are using the same GPU/"
            ),
            ["NCCL", "mode=local_sgd"],
        ),
        (RuntimeError(NO_WAY), ["GLOO_SOCKET_IFNAME=eth7 ", " lo:"]),
    ],
)
def test_a_setting_of_this_machine(error, says, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo")])
    code, line, _ = outcome(error)
    assert code == 3 and all(part in line for part in says)


def test_a_wrong_sum_is_found(monkeypatch):
    def all_reduce(numbers, spoilt=0):
        other = torch.arange(len(numbers)) * 2 + 1  # rank 1's part
        numbers += other
        numbers[-1] += spoilt

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    peers.check_sums(torch.device("cpu"), 0, 2)

    def corrupt_long(numbers):
        all_reduce(numbers, len(numbers) > 1 << 18)

    for wrong in (corrupt_long, lambda numbers: None):
        monkeypatch.setattr(dist, "all_reduce", wrong)
        with pytest.raises(SetupError, match="NCCL_P2P_DISABLE=1"):
            peers.check_sums(torch.device("cpu"), 0, 2)


class Dead:
    """Whatever waits for the device never returns: a dead rank's part of a sum is missing."""

    def __getattr__(self, name):
        raise AssertionError(f"waited for the device: {name}")


def test_a_dead_rank_shows_before_a_wait_for_the_device(monkeypatch):
    devices = []

    def all_reduce(values, *_, **__):
        devices.append(values.device.type)
        raise RuntimeError(f"{GLOO}pair.cc:561] Connection closed by peer [10.0.0.2]:4771")

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    world = World(
        Place(0, 2, 0, 1, 0, True),
        torch.device("cuda", 0),
        1,
        (),
    )
    state = SimpleNamespace(position=SimpleNamespace(step=7), updater=Dead(), unlogged=[])
    observer = SimpleNamespace(timer=Dead(), ledger=None, noticed=None)
    resolved = SimpleNamespace(world=world, recipe=SimpleNamespace(max_time=None))
    snapshots = SimpleNamespace(resolved=resolved, state=state, interrupts=None)
    sync = RankSync(observer, snapshots, SimpleNamespace(is_late=lambda: False))
    for log in (False, True):
        with pytest.raises(PeerError, match=r"\[10\.0\.0\.2\]"):
            sync.after_step(log)
    assert devices == ["cpu", "cpu"]


@pytest.mark.parametrize(("size", "device"), [(1, "cuda:0"), (1, "cpu"), (2, "cpu")])
def test_no_heartbeat_where_nothing_waits_for_a_device_of_others(monkeypatch, size, device):
    messages = []
    monkeypatch.setattr(dist, "all_reduce", lambda *given, **_: messages.append(given))
    with simulated(1):
        World(
            Place(0, size, 0, size),
            torch.device(device),
            1,
            (),
        ).heartbeat()
    assert messages == []


@pytest.mark.parametrize("size", [1, 2])
def test_a_hung_device_is_reported(monkeypatch, size, tmp_path):
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(interrupts, "skips_shutdown", threading.Event())
    monkeypatch.setattr(stacks, "_folders", [tmp_path])
    drives = (torch.device("cuda", 0), torch.device("cuda", 1))
    with simulated(2) as machine:
        world = World(
            Place(0, size, 0, size),
            drives[0],
            1,
            (),
            drives,
            timeout=0.1,
        )
        world.heartbeat()
        assert not interrupts.skips_shutdown.is_set()
        torch.ones(3, device="cuda:1")
        machine.order.hung.add(1)
        with pytest.raises(PeerError, match="cuda:1 has hung") as raised:
            world.heartbeat()
    assert "timeout=0.1 seconds" in str(raised.value)
    assert ("another rank" in str(raised.value)) == (size > 1)
    assert interrupts.skips_shutdown.is_set() and "stacks-rank0.txt" in str(raised.value)


def test_a_rank_that_was_silent_may_only_have_been_slow():
    """In a user's own code: the line names the key that waits longer."""
    assert "raise timeout=" in peers.describe_lost_peer(5.0)
    assert "timeout=" not in peers.describe_lost_peer(RuntimeError("closed"))

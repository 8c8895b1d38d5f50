"""Beside a rank: a small process that ends it when its Python cannot run, for which it does not need the rank's lock.

Compiled code starts kernels with the interpreter's lock held. When a peer is gone, the queue of kernels fills up, the
call never returns, and no handler and no thread of the rank receives a signal. Its number still comes to the wake-up
socket, for Python writes that without the lock, and this process looks there. It imports no other file of ours.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

SILENT = 5.0  # seconds without an answer until a rank is ended that has nothing to save or has lost a peer
LOOK = 0.1  # seconds between two looks
GIVEN_UP = signal.SIGVTALRM  # what ends the rank, so that the launcher knows this from the system's SIGKILL


def watch(wakeup: socket.socket, rank: int, grace: float, signals: set[int]) -> float:
    """Wait until the rank with this process id has to be ended; the seconds it was silent, or 0 if it has ended."""
    signalled = saving = False
    answered = 0.0
    peers: list[str] | None = None
    while True:
        sources: list[Any] = [0] if signalled else [0, wakeup]
        ready, _, _ = select.select(sources, [], [], LOOK if signalled else 1)
        now = time.monotonic()
        lines = os.read(0, 1 << 16).decode().splitlines() if 0 in ready else []
        if os.getppid() != rank or (0 in ready and not lines):
            return 0.0
        for line in lines:
            answered = now
            saving = line == "saving" or (saving and line != "saved")
            if line[:1].isdigit():
                peers = line.split()
        if wakeup in ready:
            with suppress(BlockingIOError):  # the rank has read what was there
                signalled = not signals.isdisjoint(wakeup.recv(1 << 12, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            answered = now
            time.sleep(LOOK)  # other signals may lie there for long
        patience = SILENT if peers is None or not all(map(_lives, peers)) else max(grace, SILENT)
        if signalled and not saving and now - answered > patience:
            return now - answered


def _lives(pid: str) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/stat", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    return False


def main(fd: str, rank: str, grace: str, *signals: str) -> None:
    silent = watch(socket.socket(fileno=int(fd)), int(rank), float(grace), {*map(int, signals)})
    if silent:
        name = os.environ.get("RANK", "0")
        line = f"a call has kept Python from running for {silent:.0f} s after a signal; ended without saving"
        print(f"trainer: rank {name}: {line}", file=sys.stderr, flush=True)
        for number in (GIVEN_UP, signal.SIGKILL):  # a user may have a handler for the first
            if os.getppid() == int(rank):
                os.kill(int(rank), number)
                time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])

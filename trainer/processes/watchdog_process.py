"""Program of the watchdog: a small process that kills a rank whose Python code cannot run.

Compiled code launches kernels while it holds Python's global interpreter lock (GIL). If a peer is
gone, the queue of kernels fills up and the launch never returns, so neither a signal handler nor a
thread of the rank can run. Python still writes the number of a signal to the wake-up socket,
because this does not need the lock, and the watchdog reads the number there. To start quickly, the
program does not import other modules of `trainer`.
"""

import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

# After a signal, the rank is killed if it sends no line for this number of seconds. While training
# has started and all peers are alive, the limit is `grace` instead, if `grace` is larger.
SILENT = 5.0
# Seconds between two checks after a signal.
LOOK = 0.1
# Signal that kills the rank. It differs from SIGKILL, so that the launcher can report the watchdog
# instead of a system that is short of memory.
WATCHDOG_SIGNAL = signal.SIGVTALRM


def watch(wakeup: socket.socket, rank: int, grace: float, signals: set[int]) -> float:
    """Wait until the rank has to be killed, or has exited.

    The rank reports its state in lines on stdin: see `Watchdog.send`.

    Args:
        wakeup: socket to which Python writes the numbers of signals.
        rank: process id of the rank.
        grace: seconds without a line from the rank, after a signal, until the rank is killed while
            all its peers are alive. A value below `SILENT` counts as `SILENT`.
        signals: numbers of the signals that ask the rank to exit.

    Returns:
        Number of seconds since the signal or the rank's last line, whichever came later; 0 if the
        rank has exited.
    """
    is_signalled = False
    is_saving = False
    answered_at = 0.0
    peers: list[str] | None = None
    while True:
        sources: list[Any] = [0]
        timeout = LOOK
        # After a signal, its number stays in the socket until the rank reads it, so `select` would
        # return immediately.
        if not is_signalled:
            sources.append(wakeup)
            timeout = 1
        ready, _, _ = select.select(sources, [], [], timeout)
        now = time.monotonic()
        lines = []
        if 0 in ready:
            lines = os.read(0, 1 << 16).decode().splitlines()
        if os.getppid() != rank or (0 in ready and not lines):
            return 0.0
        for line in lines:
            answered_at = now
            is_saving = line == "saving" or (is_saving and line != "saved")
            # The rank may read the number from the socket before this process sees it.
            is_signalled = is_signalled or line == "alive"
            if line[:1].isdigit():
                peers = line.split()
        if wakeup in ready:
            # The socket is empty if the rank has read the number in the meantime.
            with suppress(BlockingIOError):
                numbers = wakeup.recv(1 << 12, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                is_signalled = not signals.isdisjoint(numbers)
            answered_at = now
            # Numbers of other signals may stay in the socket for a long time, during which `select`
            # returns immediately.
            time.sleep(LOOK)
        patience = SILENT
        if peers is not None and all(_is_alive(pid) for pid in peers):
            patience = max(grace, SILENT)
        if is_signalled and not is_saving and now - answered_at > patience:
            return now - answered_at


def _is_alive(pid: str) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/stat", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    return False


def main(fd: str, rank: str, grace: str, *signals: str) -> None:
    wakeup = socket.socket(fileno=int(fd))
    silent_seconds = watch(wakeup, int(rank), float(grace), {*map(int, signals)})
    if silent_seconds:
        name = os.environ.get("RANK", "0")
        line = (
            f"a call has kept Python from running for {silent_seconds:.0f} s after a signal; ended "
            "without saving"
        )
        print(f"trainer: rank {name}: {line}", file=sys.stderr, flush=True)
        # SIGKILL follows, because the user's program may handle the first signal.
        for number in (WATCHDOG_SIGNAL, signal.SIGKILL):
            if os.getppid() == int(rank):
                os.kill(int(rank), number)
                time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])

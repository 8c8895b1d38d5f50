"""Beside a rank: a small process that ends it when its Python cannot run, for which it does not need the rank's lock.

Compiled code starts kernels with the interpreter's lock held. When a peer is gone, the queue of kernels fills up, the
call never returns, and no handler and no thread of the rank hears a signal. Its number still comes to the wake-up
socket, for Python writes that without the lock, and the process looks there.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from trainer.processes import children

PROGRAM = Path(__file__).with_name("watchdog_process.py")


class Watchdog:
    """In the rank: starts the process, and tells it that Python runs. Before `start` and after `stop` it does nothing.

    It never ends a rank that has not received a signal, nor one that saves.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, wakeup: socket.socket, signals: Iterable[int], grace: float) -> None:
        """`signals`: those that count; `grace`: seconds that a call may last after one while all peers live."""
        words = [wakeup.fileno(), os.getpid(), grace, *map(int, signals)]
        command = [sys.executable, "-P", "-S", str(PROGRAM), *map(str, words)]  # -S: in 20 ms, without site-packages
        with suppress(OSError):  # the system has no process left: the rank trains without
            self._process = children.beside(command, wakeup.fileno(), signals)

    def tell(self, line: str) -> None:
        """`alive` after a signal, `saving` and `saved`, or the process ids of all ranks here once training begins."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # somebody has ended it
                self._process.stdin.write(f"{line}\n".encode())

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

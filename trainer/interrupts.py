"""Signals: a flag that the loop agrees on at a step's boundary, and a watcher for when the loop cannot come.

A handler never runs while Python waits inside a collective for a peer that is gone. The watcher thread hears of the
signal through a file descriptor, gives the loop time to reach a boundary, and otherwise dumps the stacks and leaves.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType

WATCHED = (signal.SIGINT, signal.SIGTERM)
SHORTEST, LONGEST = 4.0, 18.0  # seconds from a signal, or the last boundary, until the watcher leaves


class Interrupts:
    """Within this block SIGINT and SIGTERM raise a flag instead of ending the process; a second Ctrl-C ends it at once.

    Under torchrun a second Ctrl-C arrives as SIGTERM, so SIGTERM after SIGINT ends at once too; a repeated SIGTERM does
    not. Before the first `beat` there is nothing to save and a signal ends the process without ado.
    Outside the main thread (a notebook's worker, say) nothing is installed.
    """

    def __init__(self, own_process: bool = True) -> None:
        """`own_process`: whether this process may end here; in a user's program a second Ctrl-C raises."""
        self.received: signal.Signals | None = None
        self.patience = 0.0
        self.own_process = own_process
        self._beat = time.monotonic()
        self._suspended = False
        self._done = False

    def __enter__(self) -> Interrupts:
        self._installed = threading.current_thread() is threading.main_thread()
        if not self._installed:
            return self
        self._handlers = [signal.signal(number, self._handle) for number in WATCHED]
        if self.own_process:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._watch, name="interrupts", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._installed:
            return
        for number, handler in zip(WATCHED, self._handlers, strict=True):
            signal.signal(number, handler)
        if not self.own_process:
            return
        signal.set_wakeup_fd(self._wakeup)
        self._done = True
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def beat(self, patience: float | None = None) -> None:
        """The loop is at a boundary; the next one is expected within `patience` seconds."""
        self._beat = time.monotonic()
        if patience is not None:
            self.patience = min(LONGEST, max(SHORTEST, patience))

    def suspend(self, suspended: bool) -> None:
        """While saving, the watcher waits."""
        self._suspended = suspended
        self.beat()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.received is signal.SIGINT or (self.patience == 0 and not self.own_process):
            if not self.own_process:
                raise KeyboardInterrupt
            leave_now(128 + signal.SIGINT)
        if self.received is None:
            self.received = signal.Signals(number)

    def _watch(self) -> None:
        first = os.read(self._reader, 1)[0]
        heard = time.monotonic()
        while not self._done:
            if not self._suspended and time.monotonic() - max(heard, self._beat) > self.patience:
                self._leave(signal.Signals(first))
            time.sleep(0.05)

    def _leave(self, number: signal.Signals) -> None:
        rank = os.environ.get("RANK", "0")
        if self.patience:
            print(f"trainer: rank {rank}: no step's end after {number.name}; leaving without saving", file=sys.stderr)
            faulthandler.dump_traceback(all_threads=True)
        elif rank == "0":
            print(f"trainer: stopped by {number.name} before the first step", file=sys.stderr)
        leave_now(128 + number)


def leave_now(code: int) -> None:
    """End this process without the interpreter's farewell, which aborts when gloo's threads still run."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)

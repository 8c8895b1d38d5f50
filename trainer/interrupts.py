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
    not.
    Outside the main thread (a notebook's worker, say) nothing is installed.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.patience = LONGEST
        self._beat = time.monotonic()
        self._suspended = False
        self._done = False

    def __enter__(self) -> Interrupts:
        self._installed = threading.current_thread() is threading.main_thread()
        if not self._installed:
            return self
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers = [signal.signal(number, self._handle) for number in WATCHED]
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
        if self.received is signal.SIGINT:
            leave_now(128 + signal.SIGINT)
        if self.received is None:
            self.received = signal.Signals(number)

    def _watch(self) -> None:
        heard: float | None = None
        first = 0
        while True:
            if heard is None:
                first = os.read(self._reader, 1)[0]
                heard = time.monotonic()
            if self._done:
                return
            time.sleep(0.05)
            if not self._suspended and time.monotonic() - max(heard, self._beat) > self.patience:
                rank, name = os.environ.get("RANK", 0), signal.Signals(first).name
                print(f"trainer: rank {rank}: no step's end after {name}; leaving without saving", file=sys.stderr)
                faulthandler.dump_traceback(all_threads=True)
                leave_now(128 + first)


def leave_now(code: int) -> None:
    """End this process without the interpreter's farewell, which aborts when gloo's threads still run."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)

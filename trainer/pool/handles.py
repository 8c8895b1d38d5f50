"""The parent's end of a worker: a process behind a pipe."""

from __future__ import annotations

import os
import signal
from collections import deque
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any

from trainer.pool.transport import Message, Packed, fetch, new_slot, store
from trainer.pool.worker import Definition, Kind, main
from trainer.processes import fork_server

DEPTH = 2  # batches that a worker has at most: one that it computes, and the next


class ProcessHandle:
    """A worker process. One thread calls its methods; the process dies with it."""

    def __init__(self, context: Any, definition: Definition, device: str, threads: int, name: str) -> None:
        self.connection, theirs = context.Pipe()
        self.slots = [new_slot() for _ in range(DEPTH)]
        self.free = deque(range(DEPTH))
        self.lost = False  # the pipe is closed at its other end
        arguments = (theirs, self.slots, definition, device, threads, dict(os.environ))
        self.process = context.Process(target=main, args=arguments, name=name)
        resource_tracker.ensure_running()  # now, for it unblocks SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # for the child, until it ignores SIGINT itself
        try:
            fork_server.start(self.process)
        finally:
            theirs.close()
        self.waits_on = self.connection, self.process.sentinel  # readable when the worker answers or ends

    def send(self, kind: Kind, packed: Packed) -> None:
        number = self.free[0]
        extent = store(packed, self.slots[number])
        self.free.popleft()
        with suppress(OSError):  # it died, which `ended` reports
            self.connection.send(Message(extent, kind, number))

    def receive(self) -> list[tuple[Message, Packed]]:
        """All answers so far, also those of a process that has ended since."""
        answers = []
        try:
            while self.connection.poll():
                message: Message = self.connection.recv()
                packed = fetch(self.slots[message.slot].reach(message.extent.end), message.extent, copy=True)
                if message.kind in (Kind.BATCH, Kind.JOB):
                    self.free.append(message.slot)
                answers.append((message, packed))
        except (EOFError, OSError):
            self.lost = True
        return answers

    def ended(self) -> str:
        """How it ended; empty while it runs."""
        if self.lost:
            self.process.join(0.5)
        code = self.process.exitcode
        if code is None:
            return "it closed its pipe and still runs" if self.lost else ""
        if code >= 0:
            return f"it ended with exit code {code}"
        return f"it was killed by {signal.Signals(-code).name}" + (
            " (the system may be short of memory)" if -code == signal.SIGKILL else ""
        )

    def kill(self, grace: float = 0.0) -> None:
        """Kill it, after some seconds of grace, and free its memory."""
        self.connection.close()
        self.process.join(grace)
        self.process.kill()
        self.process.join(2)
        with suppress(ValueError):  # it still runs, in an uninterruptible system call
            self.process.close()
        self.slots.clear()

"""The parent's end of a worker: a process behind a pipe, or a thread."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from typing import Any

import torch

from trainer.pool.failures import Failure
from trainer.pool.transport import Message, Packed, fetch, new_slot, pack_rows, store
from trainer.pool.worker import Caller, Definition, Kind, main
from trainer.processes import fork_server

DEPTH = 2  # batches that a worker has at most: one that it computes, and the next


@dataclass(frozen=True)
class Answer:
    """A worker's message: it is ready or broken, or the results of its oldest task."""

    kind: Kind
    open: Callable[[], Any]  # returns a batch's list of results, a job's result, a broken setup's `Failure`
    failures: int = 0
    seconds: float = 0.0
    bytes: int = 0


class ProcessHandle:
    """A worker process. One thread calls all methods but `waits_on`; the process dies with it."""

    def __init__(self, context: BaseContext, definition: Definition, device: str, threads: int, name: str) -> None:
        self.connection, theirs = context.Pipe()
        self.slots = [new_slot() for _ in range(DEPTH)]
        self.free = deque(range(DEPTH))
        self.lost = False  # the pipe is closed at its other end
        arguments = (theirs, self.slots, definition, device, threads, dict(os.environ))
        process: Any = context.Process  # type: ignore[attr-defined]
        self.process = process(target=main, args=arguments, name=name)
        resource_tracker.ensure_running()  # now, for it unblocks SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # for the child, until it ignores SIGINT itself
        try:
            fork_server.start(self.process)
        finally:
            theirs.close()

    def waits_on(self) -> Sequence[Any]:
        """What becomes readable when the worker answers or ends."""
        return self.connection, self.process.sentinel

    def send_batch(self, items: Sequence[Any]) -> int:
        """Returns the batch's bytes."""
        return self._send(Kind.BATCH, pack_rows(items))

    def send_job(self, call: Packed) -> None:
        self._send(Kind.JOB, call)

    def _send(self, kind: Kind, packed: Packed) -> int:
        number = self.free[0]
        extent = store(packed, self.slots[number])
        self.free.popleft()
        with suppress(OSError):  # it died, which `ended` reports
            self.connection.send_bytes(Message(extent, kind, number).to_bytes())
        return extent.end

    def receive(self) -> list[Answer]:
        """All answers so far, also those of a process that has ended since."""
        answers = []
        try:
            while self.connection.poll():
                message = Message.from_bytes(self.connection.recv_bytes())
                slot, extent = self.slots[message.slot], message.extent
                packed = fetch(slot.reach(extent.end), extent, copy=True)
                if message.kind in (Kind.BATCH, Kind.JOB):
                    self.free.append(message.slot)
                seconds = message.nanoseconds / 1e9
                answers.append(Answer(Kind(message.kind), packed.open, message.failures, seconds, extent.end))
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

    def stop(self) -> None:
        """Ask it to end once it is idle."""
        self.connection.close()

    def kill(self, grace: float = 0.0) -> None:
        """Kill it, after some seconds of grace, and free its memory."""
        self.connection.close()
        self.process.join(grace)
        self.process.kill()
        self.process.join(2)
        with suppress(ValueError):  # it still runs, in an uninterruptible system call
            self.process.close()
        self.slots.clear()


class ThreadHandle:
    """A worker thread. Values pass as they are."""

    def __init__(
        self, make: Callable[[torch.device], Caller], device: str, name: str, wake: Callable[[], None]
    ) -> None:
        self.tasks: queue.SimpleQueue[tuple[Kind, Any] | None] = queue.SimpleQueue()
        self.answers: deque[Answer] = deque()
        self.wake = wake
        self.thread = threading.Thread(target=self._run, args=(make, device), name=name, daemon=True)
        self.thread.start()

    def _run(self, make: Callable[[torch.device], Caller], device: str) -> None:
        try:
            caller = make(torch.device(device))
        except BaseException as error:
            self._answer(Kind.BROKEN, Failure.of(error))
            return
        self._answer(Kind.READY, None)
        while (task := self.tasks.get()) is not None:
            kind, value = task
            began = time.perf_counter()
            fetched: Callable[[], Any] = partial(_same, value)
            if kind is Kind.BATCH and caller.prepares:
                fetched = caller.prepared(fetched)
            results = caller.job(fetched) if kind is Kind.JOB else list(caller.batch(fetched))
            self._answer(kind, results, time.perf_counter() - began)

    def _answer(self, kind: Kind, results: Any, seconds: float = 0.0) -> None:
        listed = results if kind is Kind.BATCH else [results]
        failures = sum(type(result) is Failure for result in listed)
        self.answers.append(Answer(kind, lambda: results, failures, seconds))
        self.wake()

    def waits_on(self) -> Sequence[Any]:
        return ()

    def send_batch(self, items: Sequence[Any]) -> int:
        self.tasks.put((Kind.BATCH, items))
        return 0

    def send_job(self, call: Any) -> None:
        self.tasks.put((Kind.JOB, call))

    def receive(self) -> list[Answer]:
        answers = []
        while self.answers:
            answers.append(self.answers.popleft())
        return answers

    def ended(self) -> str:
        return ""

    def stop(self) -> None:
        self.tasks.put(None)

    def kill(self, grace: float = 0.0) -> None:
        """A thread cannot be killed: it ends after its current task."""
        self.thread.join(grace)


def _same(value: Any) -> Any:
    return value

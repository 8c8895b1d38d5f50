"""The pool's thread: it starts workers, receives their answers, and replaces those that end or hang."""

from __future__ import annotations

import math
import os
import selectors
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from trainer.errors import PredictionError, RecipeError
from trainer.pool.handles import ProcessHandle
from trainer.pool.scheduler import Scheduler, Seat
from trainer.pool.stream import Job, Stream
from trainer.pool.worker import Kind

STARTING = 900.0  # seconds that a setup may take: models are downloaded and compiled in it
STARTS = 10  # times that a seat's workers may end without any result
LOOK = 0.02  # seconds between two checks whether a slow device's work is to be repeated
GRACE = 1.0  # seconds for idle workers to end by themselves


class Engine:
    """Keeps a worker on each seat of a scheduler. `start` starts one."""

    def __init__(
        self, start: Callable[[Seat], ProcessHandle], scheduler: Scheduler, item_timeout: float | None
    ) -> None:
        self.start, self.scheduler, self.item_timeout = start, scheduler, item_timeout
        self.seats = scheduler.seats
        self.error: BaseException | None = None
        self._closing = False
        self._pid = os.getpid()
        self._lock = threading.RLock()  # for what callers' threads change; a finalizer may run in any of them
        self._woken, self._waker = os.pipe()
        for end in (self._woken, self._waker):  # closed with the engine, for the number may be reused
            os.set_blocking(end, False)
            weakref.finalize(self, os.close, end).atexit = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="DevicePool", daemon=True)
        self._thread.start()

    # --- callers' side ------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        with suppress(BlockingIOError):  # full: it is awake soon
            os.write(self._waker, b"x")

    def add_stream(self, ordered: bool) -> Stream:
        scheduler = self.scheduler
        with self._lock:
            self.check()
            stream = Stream(ordered, scheduler.lanes(), self.wake, scheduler.batching.window, scheduler.batching.fixed)
            scheduler.streams.append(stream)
        return stream

    def close_stream(self, stream: Stream) -> None:
        """Drop its items and the answers to come."""
        stream.closed = True
        with self._lock:
            if stream in self.scheduler.streams:
                self.scheduler.streams.remove(stream)
        self.wake()

    def add_job(self, call: Any) -> Future[Any]:
        with self._lock:
            self.check()
            future = self.scheduler.add_job(call)
        self.wake()
        return future

    def check(self) -> None:
        """Raises the error that ended the pool, if it has ended."""
        if self._copied():
            raise RecipeError("this process is a fork of one with a DevicePool and has no workers: make a new pool")
        if self.error:
            raise self.error
        if self._closing:
            raise PredictionError("the DevicePool is closed: make a new one")

    def close(self) -> None:
        """End all workers and wait for them; does nothing in a fork, which has none."""
        if self._copied():
            return
        with self._lock:
            self._closing = True
        self.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(10)

    def _copied(self) -> bool:
        return os.getpid() != self._pid

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for seat in self.seats:
                self._start(seat)
            while not self._closing:
                self.scheduler.hand_out()
                self._listen(self._time_left())
                self._replace_hung()
        except BaseException as error:
            self.error = error
        finally:
            self._end(self.error or PredictionError("the DevicePool was closed before this was done"))

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._closing = True
            self.scheduler.fail(error)
        handles = [(bool(seat.queue) or not seat.ready, seat.handle) for seat in self.seats if seat.handle]
        for _, handle in handles:
            handle.connection.close()  # it ends once it is idle
        deadline = time.monotonic() + GRACE
        for busy, handle in sorted(handles, key=lambda pair: not pair[0]):
            handle.kill(0.0 if busy else max(0.0, deadline - time.monotonic()))
        for seat in self.seats:
            seat.handle = None
        del self.start  # and with it the worker's arguments
        self._selector.close()

    def _start(self, seat: Seat) -> None:
        try:
            seat.handle = self.start(seat)
        except Exception as error:
            raise PredictionError(f"{seat} cannot be started: {error}") from error
        seat.ready, seat.since, seat.starts = False, time.monotonic(), seat.starts + 1
        for source in seat.handle.waits_on:
            self._selector.register(source, selectors.EVENT_READ, seat)

    def _listen(self, timeout: float | None) -> None:
        """Wait for answers, ended workers and callers, and handle them."""
        ready = {key.data.index for key, _ in self._selector.select(timeout) if key.data}
        with suppress(BlockingIOError):
            while os.read(self._woken, 4096):
                pass
        for seat in self.seats:
            if seat.handle and seat.index in ready:
                self._receive(seat)
                if ended := seat.handle.ended():
                    self._replace(seat, ended)

    def _receive(self, seat: Seat) -> None:
        assert seat.handle
        for message, packed in seat.handle.receive():
            if message.kind == Kind.BROKEN:
                failure = packed.open()
                error = PredictionError(f"the setup of {seat} failed: {failure.message}")
                error.add_note(f"in the worker:\n{failure.traceback}")
                raise error
            if message.kind == Kind.READY:
                seat.ready = True
            else:
                self.scheduler.answered(seat, message, packed)

    def _replace(self, seat: Seat, how: str) -> None:
        """A worker has ended, or must: start another, and repeat what it had."""
        if not seat.ready and how.endswith("exit code 1"):
            raise PredictionError(f"{seat} did not get ready: {how}; what it wrote is above")
        if seat.starts >= STARTS:
            raise PredictionError(f"{seat} ended {seat.starts} times without a result, last: {how}")
        assert seat.handle
        for source in seat.handle.waits_on:
            self._selector.unregister(source)
        seat.handle.kill()
        seat.handle = None
        seat.replaced += 1
        self.scheduler.rescue(seat, how)
        self._start(seat)

    def _deadline(self, seat: Seat) -> float:
        """When a seat's worker counts as hung."""
        if not seat.ready:
            return seat.since + STARTING
        if self.item_timeout is None or not seat.queue or isinstance(seat.queue[0], Job):
            return math.inf
        count = len(seat.queue[0].items)
        allowed = count * self.item_timeout
        usual = self.scheduler.batching.expected(seat.index, count)
        if usual is not None and count > 1:  # one item may hang, while the others take as long as usual
            allowed = min(allowed, self.item_timeout + 4 * usual)
        return seat.since + allowed

    def _time_left(self) -> float | None:
        """Seconds until something is due, or None."""
        now = time.monotonic()
        due = [self._deadline(seat) for seat in self.seats]
        due += [stream.due for stream in self.scheduler.streams if stream.due is not None]
        if len(set(self.scheduler.batching.kinds)) > 1 and any(seat.queue for seat in self.seats):
            due.append(now + LOOK)
        return max(0.0, min(due) - now) if min(due) < math.inf else None

    def _replace_hung(self) -> None:
        for seat in self.seats:
            if self._deadline(seat) > time.monotonic():
                continue
            self._receive(seat)  # it may have arrived just now
            if self._deadline(seat) <= time.monotonic():
                allowed = f"item_timeout={self.item_timeout:g} s" if seat.ready else f"the {STARTING:g} s of a setup"
                self._replace(seat, f"it took longer than {allowed} and was stopped")

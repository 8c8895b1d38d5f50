"""The pool's thread, which starts workers, receives answers, and replaces lost processes."""

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

from trainer.errors import PredictionError, RecipeError, TrainerError
from trainer.pool.handles import ProcessHandle
from trainer.pool.scheduler import PoolWorker, Scheduler
from trainer.pool.stream import Job, Stream
from trainer.pool.worker import Kind

# Maximum seconds of a setup, in which models may be downloaded and compiled.
SETUP_SECONDS = 900.0
# If the process of a worker ends this number of times in a row without any result, the pool ends
# with an error.
MAX_STARTS = 10
# Seconds between two checks of whether to repeat the work of a slow device.
REPEAT_CHECK_SECONDS = 0.02
# Seconds that idle processes have to end by themselves before they are killed.
GRACE_SECONDS = 1.0


class Engine:
    """Runs the scheduler in a thread, and keeps one process running for each of its workers."""

    def __init__(
        self,
        start: Callable[[PoolWorker], ProcessHandle],
        scheduler: Scheduler,
        item_timeout: float | None,
    ) -> None:
        """Start the thread.

        Args:
            start: function that starts the process of a worker.
            scheduler: object that assigns tasks to the workers.
            item_timeout: seconds per item after which a process counts as hung; None for no limit.
        """
        self.start = start
        self.scheduler = scheduler
        self.item_timeout = item_timeout
        self.workers = scheduler.workers
        self.error: BaseException | None = None
        self._closing = False
        self._pid = os.getpid()
        # The lock protects the state that callers' threads change. It must be reentrant, because a
        # finalizer may run in any thread, including one that holds the lock.
        self._lock = threading.RLock()
        self._woken, self._waker = os.pipe()
        # The pipe is closed together with the engine, not earlier: another thread may still write
        # to it, and the system may reuse the number of a closed descriptor.
        for end in (self._woken, self._waker):
            os.set_blocking(end, False)
            weakref.finalize(self, os.close, end).atexit = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="DevicePool", daemon=True)
        self._thread.start()

    # --- methods for callers' threads
    # ----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Wake the engine's thread."""
        # If the pipe is full, the bytes in it wake the thread.
        with suppress(BlockingIOError):
            os.write(self._waker, b"x")

    def add_stream(self, ordered: bool) -> Stream:
        """Add a stream for one call of `map`."""
        scheduler = self.scheduler
        with self._lock:
            self.check()
            stream = Stream(
                ordered,
                scheduler.lanes(),
                self.wake,
                scheduler.batching.window,
                scheduler.batching.fixed,
            )
            scheduler.streams.append(stream)
        return stream

    def close_stream(self, stream: Stream) -> None:
        """Drop the waiting items of a stream, and ignore results that arrive later."""
        stream.closed = True
        with self._lock:
            if stream in self.scheduler.streams:
                self.scheduler.streams.remove(stream)
        self.wake()

    def add_job(self, call: Any) -> Future[Any]:
        """Add a job for one call of `submit`."""
        with self._lock:
            self.check()
            future = self.scheduler.add_job(call)
        self.wake()
        return future

    def check(self) -> None:
        """Raise an error if the pool has ended, or if this process is a fork of the pool's process.

        If an error ended the pool, that error is raised.
        """
        if self._is_forked():
            raise RecipeError(
                "this process was forked from a process with a DevicePool and has no workers: "
                "create a new pool"
            )
        if self.error:
            raise self.error
        if self._closing:
            raise PredictionError("the DevicePool is closed: create a new one")

    def close(self) -> None:
        """End all processes, and wait at most 10 s for the thread that ends them.

        In a fork of the process that created the pool, nothing is done.
        """
        if self._is_forked():
            return
        with self._lock:
            self._closing = True
        self.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(10)

    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    # --- the engine's thread
    # ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for worker in self.workers:
                self._start(worker)
            while not self._closing:
                self.scheduler.hand_out()
                self._listen(self._time_left())
                self._replace_hung()
        except BaseException as error:
            self.error = error
        finally:
            self._end(
                self.error or PredictionError("the DevicePool was closed before this was done")
            )

    def _end(self, error: BaseException) -> None:
        """End all processes, and set `error` on everything that is not done."""
        with self._lock:
            self._closing = True
            self.scheduler.fail(error)
        busy = []
        idle = []
        for worker in self.workers:
            if worker.handle:
                # An idle process ends when its pipe is closed.
                worker.handle.connection.close()
                if worker.queue or not worker.ready:
                    busy.append(worker.handle)
                else:
                    idle.append(worker.handle)
        deadline = time.monotonic() + GRACE_SECONDS
        for handle in busy:
            handle.kill()
        for handle in idle:
            handle.kill(max(0.0, deadline - time.monotonic()))
        for worker in self.workers:
            worker.handle = None
        # Free the memory of the arguments of the worker class, which `start` references.
        del self.start
        self._selector.close()

    def _start(self, worker: PoolWorker) -> None:
        try:
            worker.handle = self.start(worker)
        except Exception as error:
            raise PredictionError(f"{worker} cannot be started: {error}") from error
        worker.ready = False
        worker.since = time.monotonic()
        worker.starts += 1
        for source in worker.handle.waits_on:
            self._selector.register(source, selectors.EVENT_READ, worker)

    def _listen(self, timeout: float | None) -> None:
        """Wait at most `timeout` seconds for answers, ended processes and callers, and handle them.

        If `timeout` is None, the wait has no limit.
        """
        ready = {key.data for key, _ in self._selector.select(timeout)}
        with suppress(BlockingIOError):
            while os.read(self._woken, 4096):
                pass
        for worker in self.workers:
            if worker.handle and worker in ready:
                self._receive(worker)
                if reason := worker.handle.ended():
                    self._replace(worker, reason)

    def _receive(self, worker: PoolWorker) -> None:
        assert worker.handle
        for message, packed in worker.handle.receive():
            if message.kind == Kind.BROKEN:
                failure = packed.open()
                original = failure.original()
                if isinstance(original, TrainerError):
                    raise original
                error = PredictionError(f"the setup of {worker} failed: {failure.message}")
                error.add_note(f"in the worker:\n{failure.traceback}")
                raise error
            if message.kind == Kind.READY:
                worker.ready = True
            else:
                self.scheduler.answered(worker, message, packed)

    def _replace(self, worker: PoolWorker, reason: str) -> None:
        """Replace the process of a worker, and repeat its tasks.

        Args:
            worker: the worker.
            reason: why its process ended, or why it must end.
        """
        if not worker.ready and reason.endswith("exit code 1"):
            raise PredictionError(f"the setup of {worker} failed: {reason}; its error is above")
        if worker.starts >= MAX_STARTS:
            raise PredictionError(
                f"{worker} ended {worker.starts} times without a result, most recently: {reason}"
            )
        assert worker.handle
        for source in worker.handle.waits_on:
            self._selector.unregister(source)
        worker.handle.kill()
        worker.handle = None
        worker.replaced += 1
        self.scheduler.rescue(worker, reason)
        self._start(worker)

    def _deadline(self, worker: PoolWorker) -> float:
        """Return the time, by `time.monotonic`, at which a worker's process counts as hung.

        The result is infinite if the worker is ready and has no task, or a task without a limit.
        """
        if not worker.ready:
            return worker.since + SETUP_SECONDS
        if self.item_timeout is None or not worker.queue or isinstance(worker.queue[0], Job):
            return math.inf
        count = len(worker.queue[0].items)
        allowed = count * self.item_timeout
        usual = self.scheduler.batching.expected(worker.index, count)
        # Usually only one item of a batch hangs. Allow `item_timeout` for this item, and four times
        # the usual time of the batch for the others.
        if usual is not None and count > 1:
            allowed = min(allowed, self.item_timeout + 4 * usual)
        return worker.since + allowed

    def _time_left(self) -> float | None:
        """Return the seconds until the thread must act; None if it only has to wait for events."""
        now = time.monotonic()
        due = [*map(self._deadline, self.workers)]
        due += [stream.due for stream in self.scheduler.streams if stream.due is not None]
        has_slow_devices = len(set(self.scheduler.batching.kinds)) > 1
        if has_slow_devices and any(worker.queue for worker in self.workers):
            due.append(now + REPEAT_CHECK_SECONDS)
        return max(0.0, min(due) - now) if min(due) < math.inf else None

    def _replace_hung(self) -> None:
        for worker in self.workers:
            if self._deadline(worker) > time.monotonic():
                continue
            # Check for an answer that has arrived just now, before the process is replaced.
            self._receive(worker)
            if self._deadline(worker) <= time.monotonic():
                limit = f"the {SETUP_SECONDS:g} s of a setup"
                if worker.ready:
                    limit = f"item_timeout={self.item_timeout:g} s"
                self._replace(worker, f"it took longer than {limit} and was stopped")

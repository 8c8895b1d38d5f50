"""The pool's one thread: it starts workers, hands out batches and jobs, and does again what was lost.

It alone knows who holds what. A batch is held by a worker until its answer is there; a worker that ends or hangs is
replaced, and what it held goes to the front of what waits. Nothing is lost, and what is answered twice counts once.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from trainer.errors import PredictionError, RecipeError
from trainer.pool.batching import Batching
from trainer.pool.failures import Failure, ItemError
from trainer.pool.handles import DEPTH, Answer, ProcessHandle, ThreadHandle
from trainer.pool.stream import Batch, Lane, Stream
from trainer.pool.worker import Kind

Handle = ProcessHandle | ThreadHandle

LINGER = 0.002  # seconds that an idle worker waits for more items than there are
STARTING = 900.0  # seconds that a setup may take: models are downloaded and compiled in it
STARTS = 3  # times that a worker may die before it was ready
GRACE = 1.0  # seconds for workers without work to end by themselves


@dataclass(eq=False)
class Job:
    """A call that `submit` was given."""

    future: Future[Any]
    call: Any
    lane: int
    tries: int = 0
    running: bool = False


@dataclass(eq=False)
class Seat:
    """A place for a worker on a device: the worker may be replaced, the seat stays."""

    index: int
    device: str
    handle: Handle | None = None
    ready: bool = False
    queue: deque[Batch | Job] = field(default_factory=deque)  # its tasks, the oldest is the one it does
    since: float = 0.0  # when it began with that, or with its setup
    starts: int = 0  # since it was last ready
    done: int = 0
    replaced: int = 0

    @property
    def held(self) -> int:
        return sum(len(task.indices) for task in list(self.queue) if isinstance(task, Batch))

    def __str__(self) -> str:
        return f"worker {self.index} on {self.device}"


class Engine:
    """Workers and their work.

    Args:
        start: makes a seat's worker.
        devices: one a worker.
        round_robin: whether work goes to workers in turn, or to whichever is free.
        item_timeout: seconds an item may take, or None.
        retries: times that an item is tried.
    """

    def __init__(
        self,
        start: Callable[[Seat, Callable[[], None]], Handle],
        devices: Sequence[str],
        batching: Batching,
        round_robin: bool,
        item_timeout: float | None,
        retries: int,
    ) -> None:
        self.start, self.batching, self.round_robin = start, batching, round_robin
        self.item_timeout, self.retries = item_timeout, retries
        self.seats = [Seat(index, device) for index, device in enumerate(devices)]
        self.error: BaseException | None = None
        self._streams: list[Stream] = []
        self._jobs: list[deque[Job]] = [deque() for _ in (devices if round_robin else devices[:1])]
        self._submitted = 0
        self._closing = False
        self._pid = os.getpid()
        self._lock = threading.RLock()  # of what callers' threads change; a finalizer may call from anywhere
        self._woken, self._waker = os.pipe()
        for end in (self._woken, self._waker):  # not before the last caller has gone: the number may have a new meaning
            weakref.finalize(self, os.close, end)
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="DevicePool", daemon=True)
        self._thread.start()

    # --- callers' side ------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        with suppress(BlockingIOError):  # full: it will wake
            os.write(self._waker, b"x")

    def add_stream(self, ordered: bool) -> Stream:
        width, count = self.batching.fixed, len(self.seats)
        if not self.round_robin:
            lanes, lane_of = [Lane()], (lambda index: 0)
        elif width:
            lanes = [Lane(worker * width, skip=width * (count - 1)) for worker in range(count)]
            lane_of = lambda index: index // width % count  # noqa: E731
        else:
            lanes, lane_of = [Lane(worker, step=count) for worker in range(count)], (lambda index: index % count)
        again: list[deque[Batch]] = [deque() for _ in lanes]
        stream = Stream(ordered, lanes, self.wake, self.batching.window, lane_of, again)
        with self._lock:
            self.check()
            self._streams.append(stream)
        return stream

    def close_stream(self, stream: Stream) -> None:
        """Forget what it still has: answers to come are dropped."""
        stream.closed = True
        with self._lock:
            if stream in self._streams:
                self._streams.remove(stream)
        self.wake()

    def add_job(self, call: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self.check()
            lane = self._submitted % len(self._jobs)
            self._jobs[lane].append(Job(future, call, lane))
            self._submitted += 1
        self.wake()
        return future

    def check(self) -> None:
        """Raises what ended the pool, if it has ended."""
        if os.getpid() != self._pid:
            raise RecipeError("this process was forked from one with a DevicePool and has no workers: make a new pool")
        if self.error:
            raise self.error
        if self._closing:
            raise PredictionError("the DevicePool is closed: make a new one")

    def close(self) -> None:
        """End all workers; returns when they have."""
        with self._lock:
            self._closing = True
        self.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(10)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for seat in self.seats:
                self._start(seat)
            while not self._closing:
                self._hand_out()
                self._listen(self._patience())
                self._replace_hung()
        except BaseException as error:
            self.error = error
        finally:
            self._end(self.error or PredictionError("the DevicePool was closed before this was done"))

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._closing = True
            streams, self._streams = self._streams, []
            jobs = [task for seat in self.seats for task in seat.queue if isinstance(task, Job)]
            jobs += [job for lane in self._jobs for job in lane]
        for stream in streams:
            stream.fail(error)
        for job in jobs:
            _resolve(job.future, error=error)
        handles = [(bool(seat.queue) or not seat.ready, seat.handle) for seat in self.seats if seat.handle]
        for _, handle in handles:
            handle.stop()
        deadline = time.monotonic() + GRACE
        for busy, handle in sorted(handles, key=lambda pair: not pair[0]):
            handle.kill(0.0 if busy else max(0.0, deadline - time.monotonic()))
        for seat in self.seats:
            seat.handle = None
        del self.start  # and with it the worker's arguments
        self._selector.close()

    def _start(self, seat: Seat) -> None:
        try:
            seat.handle = self.start(seat, self.wake)
        except Exception as error:
            raise PredictionError(f"{seat} cannot be started: {error}") from error
        seat.ready, seat.since, seat.starts = False, time.monotonic(), seat.starts + 1
        for source in seat.handle.waits_on():
            self._selector.register(source, selectors.EVENT_READ, seat)

    def _listen(self, patience: float | None) -> None:
        """Wait for answers, ends and callers, and deal with them."""
        before = time.monotonic()
        seats = {key.data.index: key.data for key, _ in self._selector.select(patience) if key.data}
        late = time.monotonic() - before - (patience or 0.0)
        if patience is not None and late > 1:  # this process was stopped, and so may have been the workers
            for seat in self.seats:
                seat.since += late
        with suppress(BlockingIOError):
            while os.read(self._woken, 4096):
                pass
        for seat in self.seats:
            if seat.handle and (seat.index in seats or isinstance(seat.handle, ThreadHandle)):
                for answer in seat.handle.receive():
                    self._receive(seat, answer)
                if ended := seat.handle.ended():
                    self._bury(seat, ended)

    def _receive(self, seat: Seat, answer: Answer) -> None:
        now = time.monotonic()
        if answer.kind is Kind.BROKEN:
            failure = answer.open()
            error = PredictionError(f"the setup of {seat} failed: {failure.message}")
            error.add_note(f"in the worker:\n{failure.traceback}")
            raise error
        if answer.kind is Kind.READY:
            seat.ready, seat.starts = True, 0
            return
        task = seat.queue.popleft()
        seat.since = now
        if isinstance(task, Job):
            seat.done += 1
            _finish(task.future, answer)
            return
        task.holders -= 1
        if not task.tries:  # a single item that is done again says little about batches
            self.batching.observe(seat.index, len(task.items), answer.seconds, answer.bytes)
            window = self.batching.window
            for stream in self._streams:
                stream.window = window
        if not task.done:
            task.done = True
            self._deliver(seat, task, answer)

    def _deliver(self, seat: Seat, batch: Batch, answer: Answer) -> None:
        stream = _of(batch)
        if not answer.failures:
            seat.done += len(batch.items)
            stream.deliver(batch.indices, answer.open)
            return
        results = answer.open()
        if type(results[0]) is Failure and results[0].whole:
            results = results * len(batch.items)
            if results[0].memory:
                self.batching.shrink(seat.index, len(batch.items))
        for single, result in zip(batch.singles(batch.tries + 1), results, strict=True):
            if type(result) is not Failure:
                seat.done += 1
                stream.deliver(single.indices, lambda result=result: [result])
            elif len(batch.items) > 1 and result.whole:
                self._again(single, min(single.tries, self.retries - 1), seat)
            else:
                self._try_again(single, seat, result.message, result.traceback)

    def _try_again(self, single: Batch, seat: Seat, message: str, traceback: str = "") -> None:
        """An item failed by itself: once more, or report it."""
        if single.tries < self.retries:
            self._again(single, single.tries, seat)
        else:
            index = single.indices.start
            _of(single).deliver(single.indices, ItemError(index, message, traceback))

    def _again(self, batch: Batch, tries: int, seat: Seat) -> None:
        batch.tries, stream = tries, _of(batch)
        stream.again[seat.index if self.round_robin else 0].append(batch)

    # --- what is lost -------------------------------------------------------------------------------------------------

    def _bury(self, seat: Seat, how: str) -> None:
        """A worker has ended: do again what it had, and start another."""
        if not seat.ready and (seat.starts >= STARTS or how.endswith("exit code 1")):
            raise PredictionError(f"{seat} did not get ready: {how}; what it wrote is above")
        assert seat.handle
        for source in seat.handle.waits_on():
            self._selector.unregister(source)
        seat.handle.kill()
        tasks, seat.queue = list(seat.queue), deque()
        seat.replaced += 1
        for task in reversed(tasks):
            begun = task is tasks[0]
            if isinstance(task, Job):
                self._rescue_job(seat, task, begun, how)
            else:
                self._rescue(seat, task, begun, how)
        self._start(seat)

    def _rescue(self, seat: Seat, batch: Batch, begun: bool, how: str) -> None:
        batch.holders -= 1
        if batch.done or batch.holders:
            return
        tries, stream = batch.tries + begun, _of(batch)
        lane = stream.again[seat.index if self.round_robin else 0]
        if not begun or (tries < self.retries and len(batch.items) > 1):
            batch.tries = tries  # as it was: results depend on the batch, if only in the last bits
            lane.appendleft(batch)
        elif len(batch.items) > 1:
            batch.done = True
            lane.extendleft(reversed(list(batch.singles(self.retries - 1))))  # one of them may be the reason
        else:
            batch.tries = tries
            self._try_again(batch, seat, how)

    def _rescue_job(self, seat: Seat, job: Job, begun: bool, how: str) -> None:
        job.tries += begun
        if job.tries < self.retries:
            self._jobs[job.lane].appendleft(job)
        else:
            _resolve(job.future, error=PredictionError(f"{seat} ended with the job, {job.tries} times: {how}"))

    def _deadline(self, seat: Seat) -> float | None:
        """When a seat's worker counts as hung."""
        if isinstance(seat.handle, ThreadHandle):
            return None
        if not seat.ready:
            return seat.since + STARTING
        if self.item_timeout is None or not seat.queue or isinstance(seat.queue[0], Job):
            return None
        count = len(seat.queue[0].items)
        allowed = count * self.item_timeout
        usual = self.batching.expected(seat.index, count)
        if usual is not None and count > 1:  # one item may hang, and the others take what they usually do
            allowed = min(allowed, self.item_timeout + 4 * usual)
        return seat.since + allowed

    def _patience(self) -> float | None:
        """Seconds until something is due without news, or None."""
        now = time.monotonic()
        due = [deadline for seat in self.seats if (deadline := self._deadline(seat)) is not None]
        due += [stream.due for stream in self._streams if stream.due is not None]
        if len(set(self.batching.kinds)) > 1 and any(seat.queue for seat in self.seats):
            due.append(now + 0.02)  # look whether to do again what a slow device holds
        return max(0.0, min(due) - now) if due else None

    def _replace_hung(self) -> None:
        now = time.monotonic()
        for seat in self.seats:
            if not self._late(seat, now):
                continue
            assert seat.handle
            for answer in seat.handle.receive():  # it may have come just now
                self._receive(seat, answer)
            if self._late(seat, now):
                allowed = f"item_timeout={self.item_timeout:g} s" if seat.ready else f"the {STARTING:g} s of a setup"
                self._bury(seat, f"it took longer than {allowed} and was stopped")

    def _late(self, seat: Seat, now: float) -> bool:
        deadline = self._deadline(seat)
        return deadline is not None and now > deadline

    # --- what is handed out -------------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Give every worker what it should have, the idle and the fast first."""
        for stream in self._streams:
            stream.wanted, stream.due = 0, None
        seats = [seat for seat in self.seats if seat.ready]
        seats.sort(key=lambda seat: -self.batching.paces[seat.index].rate)
        for depth in range(DEPTH):
            for seat in seats:
                while len(seat.queue) == depth and self._feed(seat):
                    pass

    def _feed(self, seat: Seat) -> bool:
        """Give a worker one more task if there is one for it. False: it has enough for now."""
        jobs = self._jobs[seat.index if self.round_robin else 0]
        if jobs:
            return not seat.queue and self._give_job(seat, jobs)
        if seat.queue and isinstance(seat.queue[0], Job):
            return False
        for stream in list(self._streams):
            again = stream.again[seat.index if self.round_robin else 0]
            batch = again.popleft() if again else self._take(seat, stream)
            if batch:
                batch.stream = stream
                self._give(seat, batch)
                return True
        return not seat.queue and not self.round_robin and self._do_again(seat)

    def _take(self, seat: Seat, stream: Stream) -> Batch | None:
        """The next items for a worker, or None: there are too few, or others are done with them sooner."""
        lane = stream.lanes[seat.index if self.round_robin else 0]
        size = self.batching.size(seat.index)
        stream.wanted = max(stream.wanted, size)  # before looking: an item that comes now wakes us
        pending = len(lane.items)
        if pending < size and not stream.ended and not self._settle_for(stream, pending):
            return None
        stream.since, stream.due = 0.0, None
        count = min(size, pending)
        if not self.round_robin:
            held = {other.index: other.held for other in self.seats if other.ready}
            count = self.batching.take(seat.index, held, pending)
        return lane.take(count) if count else None

    def _settle_for(self, stream: Stream, pending: int) -> bool:
        """Whether to take less than a batch: the caller waits for results, or no item has come for a while."""
        if not pending or self.batching.fixed:
            return False
        now = time.monotonic()
        stream.since = stream.since or now
        stream.due = stream.since + LINGER
        return stream.waiting or now >= stream.due

    def _give(self, seat: Seat, batch: Batch) -> None:
        assert seat.handle
        if not seat.queue:
            seat.since = time.monotonic()
        try:
            seat.handle.send_batch(batch.items)
        except Exception as error:
            self._refuse(seat, batch, error)
            return
        batch.holders += 1
        seat.queue.append(batch)

    def _refuse(self, seat: Seat, batch: Batch, error: Exception) -> None:
        """Items that cannot travel: find which."""
        batch.done = True
        if len(batch.items) > 1:
            _of(batch).again[seat.index if self.round_robin else 0].extendleft(
                reversed(list(batch.singles(batch.tries)))
            )
            return
        failure = Failure.of(error)
        message = f"it cannot be sent to a worker: {failure.message}"
        _of(batch).deliver(batch.indices, ItemError(batch.indices.start, message, failure.traceback))

    def _give_job(self, seat: Seat, jobs: deque[Job]) -> bool:
        assert seat.handle
        job = jobs.popleft()
        if not job.running and not job.future.set_running_or_notify_cancel():
            return True
        job.running = True
        seat.since = time.monotonic()
        seat.handle.send_job(job.call)
        seat.queue.append(job)
        return True

    def _do_again(self, seat: Seat) -> bool:
        """An idle fast device does what a slow one of another kind still holds."""
        now = time.monotonic()
        for other in self.seats:
            for place, batch in enumerate(other.queue):
                if isinstance(batch, Job) or batch.done or batch.holders > 1 or other is seat:
                    continue
                elapsed = now - other.since if not place else 0.0
                if self.batching.again(seat.index, other.index, len(batch.items), elapsed):
                    self._give(seat, batch)
                    return True
        return False

    def figures(self) -> Iterable[dict[str, Any]]:
        for seat in self.seats:
            yield {
                "device": seat.device,
                "worker": seat.index,
                "items": seat.done,
                "items_per_sec": self.batching.paces[seat.index].rate,
                "queue": seat.held,
                "batch_size": self.batching.size(seat.index),
                "replaced": seat.replaced,
            }


def _of(batch: Batch) -> Stream:
    assert batch.stream
    return batch.stream


def _finish(future: Future[Any], answer: Answer) -> None:
    try:
        result = answer.open()
    except Exception as error:
        _resolve(future, error=error)
        return
    if answer.failures:
        _resolve(future, error=result.exception())
    else:
        _resolve(future, result)


def _resolve(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    with suppress(Exception):  # it was cancelled
        future.set_exception(error) if error else future.set_result(result)

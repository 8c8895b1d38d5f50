"""Which worker gets which chunks and jobs, and which again.

A worker holds a chunk until its answer arrives. What a lost worker held goes to the front of the queue: nothing is
lost, and the first of two answers counts. The engine's thread calls all methods, but those that say otherwise.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.errors import PredictionError
from trainer.pool.batching import Batching
from trainer.pool.failures import Failure, ItemError
from trainer.pool.handles import DEPTH, ProcessHandle
from trainer.pool.stream import Chunk, Job, Lane, Stream, finish, resolve
from trainer.pool.transport import Message, Packed, pack_rows
from trainer.pool.worker import Kind

LINGER = 0.002  # seconds that an idle worker waits for a full batch


@dataclass(eq=False)
class Seat:
    """A place for a worker on a device: the worker may be replaced, the seat stays."""

    index: int
    device: str
    handle: ProcessHandle | None = None
    ready: bool = False
    queue: deque[Chunk | Job] = field(default_factory=deque)  # its tasks, the oldest first, which it computes
    since: float = 0.0  # when it began with that, or with its setup
    starts: int = 0  # since the last result
    done: int = 0  # items and jobs
    replaced: int = 0

    @property
    def held(self) -> int:
        return sum(len(task.items) for task in list(self.queue) if isinstance(task, Chunk))

    @property
    def has_job(self) -> bool:
        """Whether it is busy for an unknown time."""
        return bool(self.queue) and isinstance(self.queue[0], Job)

    def __str__(self) -> str:
        return f"worker {self.index} on {self.device}"


class Scheduler:
    """Streams and jobs on one side, seats on the other. Work goes to free workers, or `round_robin` in turn."""

    def __init__(self, seats: Sequence[Seat], batching: Batching, round_robin: bool, retries: int) -> None:
        self.seats, self.batching, self.round_robin, self.retries = seats, batching, round_robin, retries
        self.streams: list[Stream] = []
        self.jobs: list[deque[Job]] = [deque() for _ in (seats if round_robin else seats[:1])]
        self._submitted = 0

    def lanes(self) -> list[Lane]:
        """Of a new stream: one; or with round_robin one for each worker, which get items, or batches, in turn."""
        width, count = self.batching.fixed, len(self.seats)
        if not self.round_robin:
            return [Lane()]
        if width:
            return [Lane(worker * width, skip=width * (count - 1)) for worker in range(count)]
        return [Lane(worker, step=count) for worker in range(count)]

    def add_job(self, call: Any) -> Future[Any]:
        """For callers' threads, one at a time."""
        job = Job(Future(), call, self._submitted % len(self.jobs))
        self._submitted += 1
        self.jobs[job.lane].append(job)
        return job.future

    def fail(self, error: BaseException) -> None:
        """Set an error on everything that is not done."""
        for stream in self.streams:
            stream.fail(error)
        jobs = [task for seat in self.seats for task in seat.queue if isinstance(task, Job)]
        for job in jobs + [job for lane in self.jobs for job in lane]:
            resolve(job.future, error=error)

    # --- handing out --------------------------------------------------------------------------------------------------

    def hand_out(self) -> None:
        """Give every worker its next tasks, idle and fast ones first."""
        for stream in self.streams:
            stream.wanted, stream.due = 0, None
        seats = [seat for seat in self.seats if seat.ready]
        seats.sort(key=lambda seat: -self.batching.speeds[seat.index].rate)
        for depth in range(DEPTH):
            for seat in seats:
                while len(seat.queue) == depth and self._feed(seat):
                    pass

    def _lane(self, seat: Seat) -> int:
        return seat.index if self.round_robin else 0

    def _feed(self, seat: Seat) -> bool:
        """Give a worker one more task; False where there is none for it now."""
        jobs = self.jobs[self._lane(seat)]
        if jobs:
            if not seat.queue:
                self._give_job(seat, jobs.popleft())
                return True
            return False
        if seat.has_job or any(task.tries for task in seat.queue):
            return False
        for stream in list(self.streams):
            again = stream.again[self._lane(seat)]
            if again and again[0].tries and seat.queue:  # alone: a worker may prepare a task while it computes another,
                return False  # and the oldest task of a lost worker counts as the reason
            chunk = again.popleft() if again else self._take(seat, stream)
            if chunk:
                self._give(seat, chunk)
                return True
        return not seat.queue and not self.round_robin and self._repeat(seat)

    def _take(self, seat: Seat, stream: Stream) -> Chunk | None:
        """The next items for a worker, or None: there are too few, or others finish them sooner."""
        lane = stream.lanes[self._lane(seat)]
        size = self.batching.size(seat.index)
        stream.wanted = max(stream.wanted, size)  # before looking: an item that comes now wakes us
        ended = stream.ended  # before counting: nothing comes after it
        pending = len(lane.items)
        if pending < size and not ended and not self._takes_less(stream, pending):
            return None
        count = min(size, pending)
        if not self.round_robin:
            held = {other.index: other.held for other in self.seats if other.ready and not other.has_job}
            count = self.batching.take(seat.index, held, pending)
        if not count:
            return None
        if count == pending:
            stream.since = 0.0
        return lane.take(count, stream)

    def _takes_less(self, stream: Stream, pending: int) -> bool:
        """Whether to take less than a full batch: the caller waits for results, or no item has come for a while."""
        if not pending or self.batching.fixed:
            return False
        now = time.monotonic()
        stream.since = stream.since or now
        if stream.waiting or now >= stream.since + LINGER:
            return True
        stream.due = stream.since + LINGER
        return False

    def _give(self, seat: Seat, chunk: Chunk) -> None:
        assert seat.handle
        if not seat.queue:
            seat.since = time.monotonic()
        try:
            seat.handle.send(Kind.BATCH, pack_rows(chunk.items))
        except BaseException as error:  # pickling an item may raise anything, and this thread goes on
            chunk.done = True
            if len(chunk.items) > 1:  # find which
                chunk.stream.again[self._lane(seat)].extendleft(reversed(chunk.singles(chunk.tries)))
                return
            failure = Failure.of(error)
            failure = replace(failure, message=f"it cannot be sent to a worker: {failure.message}")
            chunk.stream.deliver(chunk, ItemError.of(chunk.indices.start, failure))
            return
        chunk.holders += 1
        seat.queue.append(chunk)

    def _give_job(self, seat: Seat, job: Job) -> None:
        assert seat.handle
        if not job.running and not job.future.set_running_or_notify_cancel():
            return
        job.running = True
        seat.since = time.monotonic()
        seat.queue.append(job)
        seat.handle.send(Kind.JOB, job.call)

    def _repeat(self, seat: Seat) -> bool:
        """An idle fast device repeats what a slow one of another kind still holds."""
        now = time.monotonic()
        for other in self.seats:
            for place, chunk in enumerate(other.queue):
                if isinstance(chunk, Job) or chunk.done or chunk.holders > 1 or other is seat:
                    continue
                elapsed = now - other.since if not place else 0.0
                if self.batching.again(seat.index, other.index, len(chunk.items), elapsed):
                    self._give(seat, chunk)
                    return True
        return False

    # --- answers ------------------------------------------------------------------------------------------------------

    def answered(self, seat: Seat, message: Message, packed: Packed) -> None:
        """A worker has finished its oldest task."""
        task = seat.queue.popleft()
        seat.since, seat.starts = time.monotonic(), 0
        if isinstance(task, Job):
            seat.done += 1
            finish(task.future, packed, message.failures)
            return
        task.holders -= 1
        if not task.tries:  # a repeated single item says little about batches
            self.batching.speeds[seat.index].observe(len(task.items), message.seconds, message.extent.end)
            for stream in self.streams:
                stream.window = self.batching.window
        if task.done:
            return
        task.done = True
        if message.failures:
            self._retry_failures(seat, task, packed)
        else:
            seat.done += len(task.items)
            task.stream.deliver(task, packed.open)

    def _retry_failures(self, seat: Seat, chunk: Chunk, packed: Packed) -> None:
        """Deliver the results; repeat, or report, the failures."""
        try:
            results = packed.open()
        except BaseException as error:  # one of them does not unpickle: find which
            failure = Failure.of(error)
            results = [replace(failure, whole=True)]
        if type(results[0]) is Failure and results[0].whole:
            results = results * len(chunk.items)
            if results[0].memory:
                self.batching.speeds[seat.index].shrink(len(chunk.items))
        for single, result in zip(chunk.singles(chunk.tries + 1), results, strict=True):
            if type(result) is not Failure:
                seat.done += 1
                chunk.stream.deliver(single, lambda result=result: [result])
            elif len(chunk.items) > 1 and result.whole:  # another item may be the reason: each gets a try by itself
                single.tries = min(single.tries, self.retries - 1)
                chunk.stream.again[self._lane(seat)].append(single)
            else:
                self._try_again(seat, single, result)

    def _try_again(self, seat: Seat, single: Chunk, failure: Failure) -> None:
        """An item failed by itself: try once more, or report it."""
        if single.tries < self.retries:
            single.stream.again[self._lane(seat)].append(single)
        else:
            seat.starts = min(seat.starts, 1) if seat.done else seat.starts  # the item was the reason, not the worker
            single.stream.deliver(single, ItemError.of(single.indices.start, failure))

    def rescue(self, seat: Seat, how: str) -> None:
        """A worker is lost: put what it held to the front of the queue. Only its oldest task may be the reason."""
        tasks, seat.queue = list(seat.queue), deque()
        for task in reversed(tasks):
            started = task is tasks[0]
            if isinstance(task, Chunk):
                task.holders -= 1
                if task.done or task.holders:
                    continue
            task.tries += started
            if isinstance(task, Job):
                if task.tries < self.retries:
                    self.jobs[task.lane].appendleft(task)
                else:
                    text = f"{seat} ended with the job, {task.tries} times: {how}"
                    resolve(task.future, error=PredictionError(text))
                continue
            again = task.stream.again[self._lane(seat)]
            if not started or (task.tries < self.retries and len(task.items) > 1):
                again.appendleft(task)  # unchanged: results depend on the batch, if only in the last bits
            elif len(task.items) > 1:
                task.done = True
                again.extendleft(reversed(task.singles(self.retries - 1)))
            else:
                self._try_again(seat, task, Failure(how, ""))

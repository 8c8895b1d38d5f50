"""Assignment of chunks and jobs to workers, and their repetition after failures.

A worker has a chunk from the assignment until the worker's answer arrives. The chunks of a lost
worker go to the front of the queue, so no item is lost. If two workers have the same chunk, the
first answer counts. All methods are called by the engine's thread, unless their docstring says
otherwise.
"""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from trainer.errors import PredictionError
from trainer.pool.batching import Batching
from trainer.pool.failures import Failure, ItemError
from trainer.pool.handles import DEPTH, ProcessHandle
from trainer.pool.stream import Chunk, Job, Lane, Stream, resolve
from trainer.pool.transport import Message, Packed, pack_rows
from trainer.pool.worker import Kind

# Maximum seconds that a worker waits for a full batch before it accepts fewer items. If the batch
# size is fixed, a worker accepts fewer items only at the end of the stream.
LINGER_SECONDS = 0.002


@dataclass(eq=False)
class PoolWorker:
    """A worker of the pool. Its process may be replaced by another one.

    Attributes:
        index: index of the worker in the pool.
        device: name of the worker's device.
        handle: present process of the worker; None while the worker has no process.
        ready: whether the setup of the present process has finished.
        queue: tasks of the worker, the oldest first. The worker computes the oldest task.
        since: time, by `time.monotonic`, at which the worker started the oldest task or its setup.
        starts: number of processes started since the last result.
        done: number of items and jobs done.
        replaced: number of processes that were replaced.
    """

    index: int
    device: str
    handle: ProcessHandle | None = None
    ready: bool = False
    queue: deque[Chunk | Job] = field(default_factory=deque)
    since: float = 0.0
    starts: int = 0
    done: int = 0
    replaced: int = 0

    @property
    def queued_items(self) -> int:
        """Number of items in the worker's queue. Callers' threads may read this property."""
        # Iterate over a copy: the engine's thread may change the queue meanwhile.
        return sum(len(task.items) for task in list(self.queue) if isinstance(task, Chunk))

    @property
    def has_job(self) -> bool:
        """Whether the worker computes a job, so that it is busy for an unknown time."""
        return bool(self.queue) and isinstance(self.queue[0], Job)

    def __str__(self) -> str:
        return f"worker {self.index} on {self.device}"


@dataclass(eq=False)
class Scheduler:
    """Assigns the chunks of streams and the jobs to workers.

    Tasks go to free workers, or with `round_robin` to each worker in turn.
    """

    workers: Sequence[PoolWorker]
    batching: Batching
    round_robin: bool
    retries: int
    streams: list[Stream] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A single queue of jobs for all workers; with round_robin, one queue for each worker.
        lanes = self.workers if self.round_robin else self.workers[:1]
        self.jobs: list[deque[Job]] = [deque() for _ in lanes]
        self._submitted = 0

    def lanes(self) -> list[Lane]:
        """Return the lanes of a new stream: one, or one for each worker with round_robin.

        With round_robin, consecutive items belong to consecutive workers. If the batch size is
        fixed, consecutive batches do instead.
        """
        width = self.batching.fixed
        count = len(self.workers)
        if not self.round_robin:
            return [Lane()]
        if width:
            return [Lane(worker * width, skip=width * (count - 1)) for worker in range(count)]
        return [Lane(worker, step=count) for worker in range(count)]

    def add_job(self, call: Any) -> Future[Any]:
        """Add a job and return its Future. Callers' threads call this, one at a time."""
        job = Job(Future(), call, self._submitted % len(self.jobs))
        self._submitted += 1
        self.jobs[job.lane].append(job)
        return job.future

    def fail(self, error: BaseException) -> None:
        """Set an error on every stream and on every unfinished job."""
        for stream in self.streams:
            stream.fail(error)
        tasks: list[Chunk | Job] = []
        for worker in self.workers:
            tasks += worker.queue
        for jobs in self.jobs:
            tasks += jobs
        for task in tasks:
            if isinstance(task, Job):
                resolve(task.future, error=error)

    # --- assignment
    # ----------------------------------------------------------------------------------------------

    def hand_out(self) -> None:
        """Assign tasks to workers, up to `DEPTH` each, to idle and fast workers first."""
        for stream in self.streams:
            stream.wanted = 0
            stream.due = None
        workers = [worker for worker in self.workers if worker.ready]
        workers.sort(key=lambda worker: -self.batching.speeds[worker.index].rate)
        for depth in range(DEPTH):
            for worker in workers:
                while len(worker.queue) == depth and self._assign_task(worker):
                    pass

    def _lane(self, worker: PoolWorker) -> int:
        return worker.index if self.round_robin else 0

    def _assign_task(self, worker: PoolWorker) -> bool:
        """Assign one task to `worker`. Return False if no task is available."""
        jobs = self.jobs[self._lane(worker)]
        if jobs:
            if not worker.queue:
                self._assign_job(worker, jobs.popleft())
                return True
            return False
        if worker.has_job or any(task.tries for task in worker.queue):
            return False
        for stream in list(self.streams):
            repeated = stream.again[self._lane(worker)]
            # A chunk that has failed before must be the worker's only task. A worker may prepare
            # one task while it computes another, and the oldest task of a lost worker counts as the
            # reason for its loss.
            if repeated and repeated[0].tries and worker.queue:
                return False
            chunk = repeated.popleft() if repeated else self._take_chunk(worker, stream)
            if chunk:
                self._assign_chunk(worker, chunk)
                return True
        return not worker.queue and not self.round_robin and self._repeat_slow_chunk(worker)

    def _take_chunk(self, worker: PoolWorker, stream: Stream) -> Chunk | None:
        """Take the next items of a stream for a worker.

        Returns None if there are too few items, or if the other workers finish them sooner.
        """
        lane = stream.lanes[self._lane(worker)]
        size = self.batching.size(worker.index)
        # Set `wanted` before the items are counted: an item that arrives after the count then wakes
        # this thread.
        stream.wanted = max(stream.wanted, size)
        # Read `ended` before the items are counted: if it is True, no item arrives after the count.
        ended = stream.ended
        pending = len(lane.items)
        if pending < size and not ended and not self._accepts_less(stream, pending):
            return None
        count = min(size, pending)
        if not self.round_robin:
            queued = {
                other.index: other.queued_items
                for other in self.workers
                if other.ready and not other.has_job
            }
            count = self.batching.take(worker.index, queued, pending)
        if not count:
            return None
        if count == pending:
            stream.since = 0.0
        return lane.take(count, stream)

    def _accepts_less(self, stream: Stream, pending: int) -> bool:
        """Return whether to take less than a full batch, although the iterable has not ended.

        The result is True if the caller waits for results, or if the batch has been incomplete for
        `LINGER_SECONDS`. It is always False if the batch size is fixed.
        """
        if not pending or self.batching.fixed:
            return False
        now = time.monotonic()
        stream.since = stream.since or now
        if stream.waiting or now >= stream.since + LINGER_SECONDS:
            return True
        stream.due = stream.since + LINGER_SECONDS
        return False

    def _assign_chunk(self, worker: PoolWorker, chunk: Chunk) -> None:
        assert worker.handle
        if not worker.queue:
            worker.since = time.monotonic()
        try:
            worker.handle.send(Kind.BATCH, pack_rows(chunk.items))
        except BaseException as error:
            # Pickling an item can raise any exception, and this thread must not end.
            chunk.done = True
            # Send the items separately to find the one that cannot be pickled.
            if len(chunk.items) > 1:
                singles = chunk.singles(chunk.tries)
                chunk.stream.again[self._lane(worker)].extendleft(reversed(singles))
                return
            item_error = ItemError.of(
                chunk.indices.start, Failure.of(error), "it cannot be sent to a worker: "
            )
            chunk.stream.deliver(chunk, item_error)
            return
        chunk.holders += 1
        worker.queue.append(chunk)

    def _assign_job(self, worker: PoolWorker, job: Job) -> None:
        assert worker.handle
        if not job.running and not job.future.set_running_or_notify_cancel():
            return
        job.running = True
        worker.since = time.monotonic()
        worker.queue.append(job)
        worker.handle.send(Kind.JOB, job.call)

    def _repeat_slow_chunk(self, worker: PoolWorker) -> bool:
        """Assign to an idle worker a chunk that a slow device of another kind still has.

        Returns False if there is no such chunk.
        """
        now = time.monotonic()
        for other in self.workers:
            for position, chunk in enumerate(other.queue):
                if isinstance(chunk, Job) or chunk.done or chunk.holders > 1 or other is worker:
                    continue
                elapsed = 0.0 if position else now - other.since
                items = len(chunk.items)
                if self.batching.again(worker.index, other.index, items, elapsed):
                    self._assign_chunk(worker, chunk)
                    return True
        return False

    # --- answers
    # ----------------------------------------------------------------------------------------------

    def answered(self, worker: PoolWorker, message: Message, packed: Packed) -> None:
        """Process a worker's answer to its oldest task."""
        task = worker.queue.popleft()
        worker.since = time.monotonic()
        worker.starts = 0
        if isinstance(task, Job):
            worker.done += 1
            try:
                result = packed.open()
                error = result.exception() if message.failures else None
            except BaseException as broken:
                result = None
                error = broken
            resolve(task.future, result, error)
            return
        task.holders -= 1
        # Tasks that are repeated are not measured: most are single items, whose speed says little
        # about the speed of batches.
        if not task.tries:
            speed = self.batching.speeds[worker.index]
            speed.observe(len(task.items), message.seconds, message.extent.end)
            for stream in self.streams:
                stream.window = self.batching.window
        if task.done:
            return
        task.done = True
        if message.failures:
            self._retry_failures(worker, task, packed)
        else:
            worker.done += len(task.items)
            task.stream.deliver(task, packed.open)

    def _retry_failures(self, worker: PoolWorker, chunk: Chunk, packed: Packed) -> None:
        """Deliver the results of a chunk, and repeat or report its items that failed."""
        try:
            results = packed.open()
        except BaseException as error:
            # A result does not unpickle: repeat all items separately to find it.
            results = [Failure.of(error, whole=True)]
        if type(results[0]) is Failure and results[0].whole:
            results = results * len(chunk.items)
            if results[0].memory:
                self.batching.speeds[worker.index].shrink(len(chunk.items))
        for single, result in zip(chunk.singles(chunk.tries + 1), results, strict=True):
            if type(result) is not Failure:
                worker.done += 1
                chunk.stream.deliver(single, lambda result=result: [result])
                continue
            if len(chunk.items) > 1 and result.whole:
                # Another item of the batch may be the reason, so each item gets a separate try.
                single.tries = min(single.tries, self.retries - 1)
            self._retry_item(worker, single, result)

    def _retry_item(self, worker: PoolWorker, single: Chunk, failure: Failure) -> None:
        """Repeat an item that was the reason for a failure, or report it after `retries` tries."""
        if single.tries < self.retries:
            single.stream.again[self._lane(worker)].append(single)
            return
        # Processes that were lost because of this item do not count towards `engine.MAX_STARTS`, at
        # which the pool would end with an error.
        if worker.done:
            worker.starts = min(worker.starts, 1)
        single.stream.deliver(single, ItemError.of(single.indices.start, failure))

    def rescue(self, worker: PoolWorker, reason: str) -> None:
        """Put the tasks of a lost process at the front of the queue again.

        The oldest task may be the reason for the loss, so its tries are counted. After `retries`
        tries, the task fails, or its items are repeated separately. The other tasks had not
        started.

        Args:
            worker: the worker whose process was lost.
            reason: how the process ended.
        """
        tasks = worker.queue
        worker.queue = deque()
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
                    text = f"{worker} ended with the job, {task.tries} times: {reason}"
                    resolve(task.future, error=PredictionError(text))
                continue
            repeated = task.stream.again[self._lane(worker)]
            if not started or (task.tries < self.retries and len(task.items) > 1):
                # Repeat the batch unchanged: results depend on the batch, if only in the last bits.
                repeated.appendleft(task)
            elif len(task.items) > 1:
                task.done = True
                repeated.extendleft(reversed(task.singles(self.retries - 1)))
            else:
                self._retry_item(worker, task, Failure(reason, ""))

"""Loader workers: processes that read batches ahead of their use into buffers in shared memory."""

from __future__ import annotations

import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.data.photos.decoding import describe_failure
from trainer.data.photos.photo_reader import Key, Reader, Report
from trainer.data.sets import Datasets, PhotoSource, TensorSpec
from trainer.data.workers.worker_counts import PREFETCH
from trainer.errors import PeerError, RecipeError, SetupError
from trainer.processes import fork_server
from trainer.processes.resources import MAX_KEPT_BLOCK, keep_freed_memory
from trainer.recipe.image_sizes import sides

# Seconds between two checks that the workers are alive.
POLL_SECONDS = 1.0


class Buffers(NamedTuple):
    """Slots for batches.

    Attributes:
        inputs: for each source, (slots, rows, ...) inputs of the samples. All are views of the
            same memory.
        labels: (slots, rows, ...) targets of the samples.
        order: (slots, rows) int64, the sample indices that a worker reads into the slot.
    """

    inputs: Sequence[Tensor]
    labels: Tensor
    order: Tensor

    @classmethod
    def allocate(
        cls,
        datasets: Datasets,
        rows: int,
        count: int,
        shared: bool,
        sources: Sequence[PhotoSource],
    ) -> Buffers:
        """Allocate `count` slots for batches of `rows` samples, in shared memory if `shared`."""
        specs = [buffered(datasets, source is datasets.train) for source in sources]
        elements = max(math.prod(spec.shape) for spec in specs)
        memory = torch.zeros(count, rows * elements, dtype=specs[0].dtype)
        labels = torch.zeros(count, rows, *datasets.targets.shape, dtype=datasets.targets.dtype)
        order = torch.zeros(count, rows, dtype=torch.int64)
        if shared:
            for tensor in (memory, labels, order):
                tensor.share_memory_()  # type: ignore[no-untyped-call]
        inputs = []
        for spec in specs:
            used = memory[:, : rows * math.prod(spec.shape)]
            inputs.append(used.view(count, rows, *spec.shape))
        return cls(inputs, labels, order)


def buffered(datasets: Datasets, training: bool) -> TensorSpec:
    """Return shape and type of one sample's inputs in a buffer, in training or evaluation."""
    size = datasets.image_size
    if training and datasets.train_size:
        size = datasets.train_size
    return datasets.plain or TensorSpec((*sides(size), datasets.channels), torch.uint8)


class Filled(NamedTuple):
    """A batch in a slot, which the caller may use until it requests the next batch.

    Attributes:
        inputs: (rows, ...) inputs of the samples, then of padding.
        labels: (rows, ...) targets of the samples, then of padding.
        report: number of samples, and the samples that could not be read.
    """

    inputs: Tensor
    labels: Tensor
    report: Report


@dataclass(eq=False)
class InProcess:
    """Reads batches in this process, for data.workers=0. It has the interface of `Workers`."""

    buffers: Buffers
    readers: list[Reader]

    def read(self, keys: Sequence[Key]) -> Iterator[Filled]:
        for part, epoch, index in keys:
            report = self.readers[part].fill(0, epoch, index)
            yield Filled(self.buffers.inputs[part][0], self.buffers.labels[0], report)

    def prefetch(self, keys: Sequence[Key]) -> None:
        pass

    def ready(self) -> bool:
        return False

    def close(self) -> None:
        pass


@dataclass(eq=False)
class Request:
    """A batch that was requested from a worker.

    Attributes:
        key: number of the reader, epoch and sample indices of the batch.
        worker: the worker that reads the batch.
        slot: index of the worker's slot that receives the batch.
        report: result of the read; None until the worker has sent it.
        is_dropped: whether the batch is no longer needed.
    """

    key: Key
    worker: Worker
    slot: int
    report: Report | None = None
    is_dropped: bool = False


@dataclass(eq=False)
class Worker:
    """A worker process with its slots.

    Attributes:
        requests: requests that the worker has not answered, the oldest first.
        free: indices of unused slots.
    """

    process: BaseProcess
    connection: Connection
    buffers: Buffers
    requests: deque[Request] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.free = deque(range(len(self.buffers.order)))

    def request(self, key: Key) -> Request:
        """Request a batch from the worker, which must have a free slot."""
        request = Request(key, self, self.free.popleft())
        part, epoch, index = key
        samples = torch.from_numpy(np.ascontiguousarray(index))
        self.buffers.order[request.slot, : len(index)] = samples
        self.requests.append(request)
        # The message is small, so that sending it never blocks. If the worker has died, `_listen`
        # detects it.
        with suppress(OSError):
            self.connection.send((part, request.slot, epoch, len(index)))
        return request


class Workers:
    """Worker processes that read batches in parallel and deliver them in order.

    Each worker fills its own slots in shared memory, and only small messages about the slots go
    through a pipe. A training step therefore allocates no memory for a batch, and a worker that is
    stopped cannot block this process in the middle of a tensor.
    """

    def __init__(
        self,
        sources: Sequence[PhotoSource],
        readers: Callable[[int], tuple[Buffers, list[Reader]]],
        count: int,
        timeout: float,
    ) -> None:
        """Prepare to start workers, each when it is first needed.

        Args:
            sources: the sources that the keys refer to, for error messages.
            readers: function that accepts a number of slots, and returns a worker's buffers with
                these slots and one reader for each source.
            count: maximum number of processes.
            timeout: seconds without an answer after which a worker counts as hung.
        """
        self._sources = sources
        self._readers = readers
        self.count = count
        self._timeout = timeout
        self._workers: list[Worker] = []
        self._processes: list[BaseProcess] = []
        # Requests in the order in which the caller needs the batches.
        self._requests: deque[Request] = deque()
        # Batches that are not yet requested from any worker.
        self._pending: deque[Key] = deque()
        # Number of the latest call of `read`, which invalidates the iterators of earlier calls.
        self._generation = 0
        # This process may exit without calling close(). Workers ignore SIGTERM, so they must be
        # killed before multiprocessing joins them: finalizers with a priority run before that.
        util.Finalize(self, _kill, (self._processes,), exitpriority=10)

    def read(self, keys: Sequence[Key]) -> Iterator[Filled]:
        """Start to read batches, and return an iterator over them in the order of `keys`.

        If batches were prefetched, they are used if they match `keys`, and dropped otherwise.

        Raises:
            PeerError: a worker died or hangs.
            RecipeError, SetupError: no worker can be started.
        """
        self._generation += 1
        is_prefetched = len(self._requests) <= len(keys) and all(
            request.key[:2] == key[:2] and np.array_equal(request.key[2], key[2])
            for request, key in zip(self._requests, keys, strict=False)
        )
        if not is_prefetched:
            self._drop()
        self._pending = deque(keys[len(self._requests) :])
        self._send_requests()
        return self._batches(keys, self._generation)

    def prefetch(self, keys: Sequence[Key]) -> None:
        """Read batches for the next call of `read`, after all batches requested so far."""
        self._pending.extend(keys)
        self._send_requests()

    def ready(self) -> bool:
        """Return whether the next batch has been read."""
        self._listen(0)
        return bool(self._requests) and self._requests[0].report is not None

    def close(self) -> None:
        """End the workers, and kill those that do not end in time."""
        self._generation += 1
        self._drop()
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + 2 * POLL_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        _kill(self._processes)
        self._workers.clear()
        self._processes.clear()

    def _batches(self, keys: Sequence[Key], generation: int) -> Iterator[Filled]:
        remaining = len(keys)
        try:
            for key in keys:
                remaining -= 1
                if generation != self._generation:
                    raise RuntimeError("these batches were dropped by a later call of read()")
                request = self._await(key)
                worker = request.worker
                inputs = worker.buffers.inputs[key[0]][request.slot]
                labels = worker.buffers.labels[request.slot]
                assert request.report is not None
                try:
                    yield Filled(inputs, labels, request.report)
                finally:
                    worker.free.append(request.slot)
        except GeneratorExit:
            # Once the caller has received the last batch, all open requests are for prefetched
            # batches, which must be kept.
            if generation == self._generation and remaining:
                self._drop()
            raise
        except PeerError:
            self.close()
            raise

    def _await(self, key: Key) -> Request:
        """Wait for the next batch, at most `timeout` seconds.

        Time in which this process was stopped does not count.
        """
        waited = 0.0
        while True:
            self._send_requests()
            start = time.perf_counter()
            if self._requests and self._requests[0].report is not None:
                return self._requests.popleft()
            if waited >= self._timeout:
                if self._requests:
                    worker = self._requests[0].worker
                else:
                    worker = next(worker for worker in self._workers if worker.requests)
                event = f"{worker.process.pid} did not answer for timeout={self._timeout:g} seconds"
                raise PeerError(self._describe_failure(key, event))
            self._listen(min(POLL_SECONDS, self._timeout - waited))
            waited += min(time.perf_counter() - start, 2 * POLL_SECONDS)

    def _send_requests(self) -> None:
        while self._pending and (worker := self._choose_worker()) is not None:
            self._requests.append(worker.request(self._pending.popleft()))

    def _choose_worker(self) -> Worker | None:
        """Return the worker with the fewest requests, or None if no worker can accept one.

        A new worker is started before any worker has two requests.
        """
        if len(self._workers) < self.count and all(worker.requests for worker in self._workers):
            self._workers.append(self._start())
        candidates = (
            worker for worker in self._workers if worker.free and len(worker.requests) < PREFETCH
        )
        return min(candidates, key=lambda worker: len(worker.requests), default=None)

    def _listen(self, seconds: float) -> None:
        """Receive the reports of workers, and wait at most `seconds` for the first report."""
        busy: dict[Any, Worker] = {
            worker.connection: worker for worker in self._workers if worker.requests
        }
        for connection in wait(list(busy), seconds):
            worker = busy[connection]
            try:
                report = worker.connection.recv()
            except (EOFError, OSError):
                raise PeerError(self._describe_death(worker)) from None
            request = worker.requests.popleft()
            request.report = report
            if request.is_dropped:
                worker.free.append(request.slot)

    def _drop(self) -> None:
        """Drop all requests, and all batches that are not requested yet.

        If a worker is still reading a batch, its slot becomes free when the worker has read it.
        """
        for request in self._requests:
            request.is_dropped = True
            if request.report is not None:
                request.worker.free.append(request.slot)
        self._requests.clear()
        self._pending.clear()

    def _start(self) -> Worker:
        number = len(self._workers)
        try:
            context = fork_server.start_server("torchvision", "trainer.data.photos.photo_reader")
            # The caller uses one batch while the workers read others, so all workers together need
            # one additional slot.
            buffers, readers = self._readers(PREFETCH + (number == 0))
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(theirs, readers, buffers.order),
                daemon=True,
            )
            fork_server.start_process(process)
        except (TypeError, AttributeError, ImportError, pickle.PicklingError) as error:
            by_name = [source for source in self._sources if not getattr(source, "by_value", True)]
            if not by_name:
                raise RecipeError(
                    f"the data set cannot be sent to loader workers ({error}); "
                    "define its class in a module, or set data.workers=0"
                ) from None
            # Pickle the data set by value and try again: a lambda, or a class that is defined in a
            # function, cannot be pickled by name.
            for source in by_name:
                source.by_value = True  # type: ignore[attr-defined]
            return self._start()
        except (EOFError, ConnectionError):
            raise PeerError("the process that loader workers are forked from was killed") from None
        except (OSError, RuntimeError) as error:
            # torch raises RuntimeError if it cannot share memory.
            raise SetupError(
                f"loader worker {number + 1} of {self.count} cannot be started "
                f"({describe_failure(error)}); use fewer data.workers (data.workers=0 needs none)"
            ) from None
        theirs.close()
        self._processes.append(process)
        return Worker(process, ours, buffers)

    def _describe_death(self, worker: Worker) -> str:
        worker.process.join(POLL_SECONDS)
        code = worker.process.exitcode or 0
        # A killed worker has a negative exit code, or `SERVER_GONE_CODE` if the fork server was
        # killed. Any other positive code means that it failed to start.
        if code > 0 and code != fork_server.SERVER_GONE_CODE:
            return (
                "loader workers failed to start; their error is printed above. They import the "
                'training script, which needs if __name__ == "__main__": around train(...), or '
                "data.workers=0"
            )
        # Other workers may have been killed at the same time. Wait for their exit codes.
        time.sleep(0.1)
        dead = [str(process.pid) for process in self._processes if process.exitcode]
        pids = ", ".join(dead) or worker.process.pid
        return self._describe_failure(
            worker.requests[0].key, f"{pids} died (killed, or out of memory)"
        )

    def _describe_failure(self, key: Key, event: str) -> str:
        source = self._sources[key[0]]
        index = key[2]
        first = ""
        if len(index):
            first = f" from {source.where(int(index[0]) % len(source))} on"
        return (
            f"loader worker {event} while reading {len(index)} samples{first}; data.workers=0 "
            "reads in this process"
        )


def serve(
    connection: Connection,
    readers: Sequence[Reader],
    order: Tensor,
) -> None:
    """Read batches in a worker process until the other end of its pipe is closed."""
    begin_worker()
    while True:
        try:
            part, slot, epoch, count = connection.recv()
            index = order[slot, :count].numpy().copy()
            connection.send(readers[part].fill(slot, epoch, index))
        except (EOFError, OSError):
            return


def begin_worker() -> None:
    """Prepare a process that reads photos, with a single torch thread."""
    fork_server.begin_worker()
    keep_freed_memory(MAX_KEPT_BLOCK)
    torch.set_num_threads(1)


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()

"""Loader workers, which are asked for batches ahead of their use and fill them into buffers in shared memory."""

from __future__ import annotations

import pickle
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.data.photos.decoding import reason
from trainer.data.photos.photo_reader import Key, Reader, Report
from trainer.data.sets import Datasets, PhotoSource, TensorSpec
from trainer.data.workers.worker_counts import PREFETCH, slots
from trainer.errors import PeerError, RecipeError, SetupError
from trainer.processes import fork_server
from trainer.processes.resources import PHOTOS, keep_freed_memory
from trainer.recipe.image_sizes import sides

MESSAGE = struct.Struct("4q")  # part, slot, epoch or -1, samples: of one size, so that sending it never blocks
POLL = 1.0  # seconds between two checks that the workers live


class Buffers(NamedTuple):
    """Slots for batches: inputs (slots, rows, ...), labels (slots, rows, ...), and indices (slots, rows) to read."""

    inputs: Tensor
    labels: Tensor
    order: Tensor

    @classmethod
    def allocate(cls, datasets: Datasets, rows: int, count: int, shared: bool) -> Buffers:
        specs = buffered(datasets), datasets.targets, TensorSpec((), torch.int64)
        buffers = cls(*(torch.zeros(count, rows, *spec.shape, dtype=spec.dtype) for spec in specs))
        for tensor in buffers if shared else ():
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        return buffers


def buffered(datasets: Datasets) -> TensorSpec:
    """A sample's inputs in a buffer."""
    return datasets.plain or TensorSpec((*sides(datasets.image_size), datasets.channels), torch.uint8)


Readers = Callable[[Buffers], Sequence[Reader]]  # makes a reader of each source, which fills these buffers


class Filled(NamedTuple):
    """A batch in a slot, which is the caller's until it asks for the next batch."""

    inputs: Tensor
    labels: Tensor
    report: Report


class InProcess:
    """In place of workers: this process reads, when it is asked."""

    def __init__(self, buffers: Buffers, readers: Readers) -> None:
        self._buffers, self._readers = buffers, readers(buffers)

    def read(self, keys: Sequence[Key]) -> Iterator[Filled]:
        for part, epoch, index in keys:
            report = self._readers[part].fill(0, epoch, index)
            yield Filled(self._buffers.inputs[0], self._buffers.labels[0], report)

    def prefetch(self, keys: Sequence[Key]) -> None:
        pass

    def ready(self) -> bool:
        return False

    def close(self) -> None:
        pass


@dataclass(eq=False)
class Request:
    """A batch that a worker has been asked for."""

    key: Key
    worker: Worker
    slot: int
    report: Report | None = None
    wanted: bool = True


class Worker:
    """A process, its slots, and what it has been asked for, the oldest first."""

    def __init__(self, process: BaseProcess, connection: Connection, buffers: Buffers) -> None:
        self.process, self.connection, self.buffers = process, connection, buffers
        self.free = deque(range(len(buffers.inputs)))
        self.requests: deque[Request] = deque()

    def ask(self, key: Key) -> Request:
        request = Request(key, self, self.free.popleft())
        part, epoch, index = key
        self.buffers.order[request.slot, : len(index)] = torch.from_numpy(np.ascontiguousarray(index))
        self.requests.append(request)
        with suppress(OSError):  # it died, which `_listen` finds
            self.connection.send_bytes(MESSAGE.pack(part, request.slot, -1 if epoch is None else epoch, len(index)))
        return request


class Workers:
    """Keeps processes busy with batches to be read.

    A worker fills slots of its own in shared memory, and only their numbers are sent: nothing is allocated in a step,
    and a stopped worker cannot block this process in the middle of a tensor. Batches come in order, whoever reads them.
    """

    def __init__(
        self,
        sources: Sequence[PhotoSource],
        allocate: Callable[[int], Buffers],
        readers: Readers,
        count: int,
        timeout: float,
    ) -> None:
        """`allocate` makes buffers of so many slots; `count` is the number of processes."""
        self._sources, self._allocate, self._readers = sources, allocate, readers
        self.count, self._timeout = count, timeout
        self._workers: list[Worker] = []
        self._processes: list[BaseProcess] = []
        self._asked: deque[Request] = deque()  # in the order in which they are wanted
        self._todo: deque[Key] = deque()  # not asked for yet
        self._turn = 0  # calls of `read`
        # For a process that ends without close(): before multiprocessing joins the workers, which ignore SIGTERM.
        util.Finalize(self, _kill, (self._processes,), exitpriority=10)

    def read(self, keys: Sequence[Key]) -> Iterator[Filled]:
        """Each key's batch; starts to read at once. What is left of an earlier call is dropped.

        Raises:
            PeerError: a worker died or hangs.
            RecipeError, SetupError: none can be started.
        """
        self._turn += 1
        known = len(self._asked) <= len(keys) and all(
            request.key[:2] == key[:2] and np.array_equal(request.key[2], key[2])
            for request, key in zip(self._asked, keys, strict=False)
        )
        if not known:
            self._drop()
        self._todo = deque(keys[len(self._asked) :])
        self._fill()
        return self._batches(keys, self._turn)

    def prefetch(self, keys: Sequence[Key]) -> None:
        """Read these after that, as soon as workers have no other work."""
        self._todo.extend(keys)
        self._fill()

    def ready(self) -> bool:
        """Whether the next batch has been read."""
        self._listen(0)
        return bool(self._asked) and self._asked[0].report is not None

    def close(self) -> None:
        """End the workers; one that does not end in time is killed."""
        self._turn += 1
        self._drop()
        self._todo.clear()
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + 2 * POLL
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        _kill(self._processes)
        self._workers.clear()
        self._processes.clear()

    def _batches(self, keys: Sequence[Key], turn: int) -> Iterator[Filled]:
        left = len(keys)
        try:
            for key in keys:
                left -= 1
                if turn != self._turn:
                    raise RuntimeError("these batches were dropped when others were asked for")
                request = self._await(key)
                worker, slot = request.worker, request.slot
                assert request.report is not None
                try:
                    yield Filled(worker.buffers.inputs[slot], worker.buffers.labels[slot], request.report)
                finally:
                    worker.free.append(slot)
        except GeneratorExit:
            if turn == self._turn and left:  # else all have been used, and what is asked for was prefetched
                self._drop()
                self._todo.clear()
            raise
        except PeerError:
            self.close()
            raise

    def _await(self, key: Key) -> Request:
        """The next batch, within `timeout` seconds; those in which this process was stopped do not count."""
        waited = 0.0
        while True:
            self._fill()
            start = time.perf_counter()
            if self._asked and self._asked[0].report is not None:
                return self._asked.popleft()
            if waited >= self._timeout:
                worker = self._asked[0].worker if self._asked else next(each for each in self._workers if each.requests)
                late = f"{worker.process.pid} did not answer for timeout={self._timeout:g} seconds"
                raise PeerError(self._failure(key, late))
            self._listen(min(POLL, self._timeout - waited))
            waited += min(time.perf_counter() - start, 2 * POLL)

    def _fill(self) -> None:
        while self._todo and (worker := self._idlest()) is not None:
            self._asked.append(worker.ask(self._todo.popleft()))

    def _idlest(self) -> Worker | None:
        """The worker for the next request: a new one before any has two requests. None: all have enough."""
        if len(self._workers) < self.count and all(worker.requests for worker in self._workers):
            self._workers.append(self._start())
        able = (worker for worker in self._workers if worker.free and len(worker.requests) < PREFETCH)
        return min(able, key=lambda worker: len(worker.requests), default=None)

    def _listen(self, seconds: float) -> None:
        """Receive what workers have answered, or wait so long for it."""
        busy: dict[Any, Worker] = {worker.connection: worker for worker in self._workers if worker.requests}
        for connection in wait(list(busy), seconds):
            worker = busy[connection]
            try:
                report = worker.connection.recv()
            except (EOFError, OSError):
                raise PeerError(self._died(worker)) from None
            request = worker.requests.popleft()
            request.report = report
            if not request.wanted:
                worker.free.append(request.slot)

    def _drop(self) -> None:
        """Drop the requests: their slots are free once they have been read."""
        for request in self._asked:
            request.wanted = False
            if request.report is not None:
                request.worker.free.append(request.slot)
        self._asked.clear()

    def _start(self) -> Worker:
        number = len(self._workers)
        try:
            context = fork_server.context("torchvision", "trainer.data.photos.photo_reader")
            buffers = self._allocate(slots(number + 1) - slots(number) if number else slots(1))
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, self._readers(buffers), buffers.order), daemon=True)
            fork_server.start(process)
        except (TypeError, AttributeError, ImportError, pickle.PicklingError) as error:
            by_name = [source for source in self._sources if not getattr(source, "by_value", True)]
            if not by_name:
                raise RecipeError(
                    f"the data set cannot be sent to loader workers ({error}); "
                    "define its class in a module, or set data.workers=0"
                ) from None
            for source in by_name:  # a lambda, or a class within a function: pickle by value
                source.by_value = True  # type: ignore[attr-defined]
            return self._start()
        except (EOFError, ConnectionError):
            raise PeerError("the process that loader workers are forked from was killed") from None
        except (OSError, RuntimeError) as error:  # RuntimeError: torch cannot share memory
            raise SetupError(
                f"loader worker {number + 1} of {self.count} cannot be started ({reason(error)}); "
                "use fewer data.workers (data.workers=0 needs none)"
            ) from None
        theirs.close()
        self._processes.append(process)
        return Worker(process, ours, buffers)

    def _died(self, worker: Worker) -> str:
        worker.process.join(POLL)
        code = worker.process.exitcode or 0
        if code > 0 and code != fork_server.GONE:  # a killed one has a negative code, or that of its fork server's end
            return (
                "loader workers failed to start, their error is above; they import the script that trains: "
                'it needs if __name__ == "__main__": around train(...), or data.workers=0'
            )
        time.sleep(0.1)  # what killed it may have killed others
        dead = ", ".join(str(each.pid) for each in self._processes if each.exitcode) or worker.process.pid
        return self._failure(worker.requests[0].key, f"{dead} died (killed, or out of memory)")

    def _failure(self, key: Key, what: str) -> str:
        source, index = self._sources[key[0]], key[2]
        first = f" from {source.where(int(index[0]) % len(source))} on" if len(index) else ""
        reading = f"while reading {len(index)} samples{first}; data.workers=0 reads in this process"
        return f"loader worker {what} {reading}"


def serve(connection: Connection, readers: Sequence[Reader], order: Tensor) -> None:
    """A worker, until its pipe is closed at the other end."""
    fork_server.begin_worker()
    keep_freed_memory(PHOTOS)
    torch.set_num_threads(1)
    while True:
        try:
            part, slot, epoch, count = MESSAGE.unpack(connection.recv_bytes())
            index = order[slot, :count].numpy().copy()
            connection.send(readers[part].fill(slot, None if epoch < 0 else epoch, index))
        except (EOFError, OSError):
            return


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()

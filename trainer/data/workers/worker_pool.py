"""A pool of loader workers, which are asked for batches ahead of their use and fill them into shared memory."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from trainer.data.photos.decoding import reason
from trainer.data.photos.photo_reader import Key, Report
from trainer.data.sets import PhotoSource
from trainer.data.workers.worker_counts import PREFETCH, slots
from trainer.data.workers.worker_process import MESSAGE, Buffers, Filled, Readers, serve
from trainer.errors import PeerError, RecipeError, SetupError
from trainer.processes import fork_server

POLL = 1.0  # seconds between two checks that the workers live


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


class Request:
    """A batch that a worker has been asked for."""

    def __init__(self, key: Key, worker: Worker, slot: int) -> None:
        self.key, self.worker, self.slot = key, worker, slot
        self.report: Report | None = None
        self.wanted = True


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
        for rest in (self._workers, self._processes):
            rest.clear()

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
                raise PeerError(self._late(key))
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
            info = {"id": number, "num_workers": self.count}
            process = context.Process(
                target=serve, args=(theirs, self._readers(buffers), buffers.order, info), daemon=True
            )
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
        time.sleep(0.1)  # what killed it may have killed others
        codes = {process.pid: process.exitcode for process in self._processes}
        # A killed one has a negative code; one that ended because its fork server was killed has GONE.
        if any((code or 0) > 0 and code != fork_server.GONE for code in codes.values()):
            return (
                "loader workers failed to start, their error is above; they import the script that trains: "
                'it needs if __name__ == "__main__": around train(...), or data.workers=0'
            )
        pids = [str(pid) for pid, code in codes.items() if code] or [str(worker.process.pid)]
        return self._failure(worker.requests[0].key, f"{', '.join(pids)} died (killed, or out of memory)")

    def _late(self, key: Key) -> str:
        busy = [worker for worker in self._workers if worker.requests]
        worker = self._asked[0].worker if self._asked else busy[0]
        return self._failure(key, f"{worker.process.pid} did not answer for timeout={self._timeout:g} seconds")

    def _failure(self, key: Key, what: str) -> str:
        part, _, index = key
        source = self._sources[part]
        first = f" from {source.where(int(index[0]) % len(source))} on" if len(index) else ""
        return f"loader worker {what} while reading {len(index)} samples{first}; data.workers=0 reads in this process"


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()

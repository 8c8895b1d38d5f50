"""Inside a worker: the user's callable on one device, and the loop that answers the parent."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from trainer.errors import RecipeError
from trainer.pool.failures import Failure
from trainer.pool.transport import Extent, Message, Packed, fetch, new_slot, pack, pack_rows, store
from trainer.processes import fork_server
from trainer.processes.memory_file import MemoryFile


class Kind(IntEnum):
    """Of a message."""

    READY = 0
    BROKEN = 1  # the setup failed
    BATCH = 2
    JOB = 3


class _Here(threading.local):
    device: torch.device | None = None


_here = _Here()


def current_device() -> torch.device:
    """The device of the `DevicePool`'s worker that calls this. Raises RecipeError outside of one."""
    if _here.device is None:
        raise RecipeError("current_device() works in a DevicePool's workers only: call it in what the pool runs")
    return _here.device


def enter(device: torch.device) -> None:
    """Make a device current in this thread, for `current_device` and for CUDA."""
    _here.device = device
    if device.type == "cuda":
        torch.cuda.set_device(device)


class Caller:
    """The user's worker on a device: calls it for batches and for jobs, and turns exceptions into `Failure`s."""

    def __init__(self, worker: Callable[..., Any], arguments: Sequence[Any], device: torch.device) -> None:
        enter(device)
        self.device = device
        self.worker: Any = worker(*arguments) if isinstance(worker, type) else worker
        if hasattr(self.worker, "setup"):
            self.worker.setup(device)

    @property
    def prepares(self) -> bool:
        """Whether the worker prepares a batch while it still computes another."""
        return hasattr(self.worker, "prepare")

    def prepared(self, items: Callable[[], Sequence[Any]]) -> Callable[[], Sequence[Any]]:
        """A function for `batch` that returns the prepared items."""
        try:
            values = self.worker.prepare(items())
        except BaseException as error:
            return partial(_raise, error)
        return lambda: values

    def batch(self, items: Callable[[], Sequence[Any]]) -> Any:
        """A result or a `Failure` for each item, or one `Failure` of the whole batch; `items` returns them."""
        try:
            enter(self.device)
            values = items()
            if hasattr(self.worker, "batch"):
                return _checked(self.worker.batch(values), len(values))
        except BaseException as error:
            return [Failure.of(error, whole=True)]
        return [self._one(value) for value in values]

    def _one(self, item: Any) -> Any:
        try:
            return self.worker(item)
        except BaseException as error:
            return Failure.of(error)

    def job(self, call: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]) -> Any:
        try:
            enter(self.device)
            function, arguments, keywords = call()
            return function(*arguments, **keywords)
        except BaseException as error:
            return Failure.of(error)

    def usable(self) -> bool:
        """Whether the device still works after a failure: some CUDA errors stay for a process's life."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception:
            return False
        return True


def _raise(error: BaseException) -> Any:
    raise error


def _checked(results: Any, count: int) -> Any:
    kind = type(results).__name__
    if isinstance(results, dict | str | bytes) or not hasattr(results, "__len__"):
        raise TypeError(f"batch() gave a {kind}: return a list of {count} results, or a tensor of shape ({count}, ...)")
    rows = results if isinstance(results, torch.Tensor | np.ndarray) else list(results)
    if len(rows) != count:
        raise ValueError(f"batch() gave {len(rows)} results for {count} items: return one for each, in order")
    return rows


# --- in a process -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """The worker and its arguments, pickled once and mapped by every process: weights are in memory once."""

    slot: MemoryFile
    extent: Extent

    @classmethod
    def of(cls, worker: Callable[..., Any], arguments: Sequence[Any]) -> Definition:
        slot = new_slot()
        return cls(slot, store(pack((worker, tuple(arguments))), slot))

    def open(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The arguments are copied on write, for this process alone."""
        opened: tuple[Callable[..., Any], tuple[Any, ...]] = fetch(self.slot.private(), self.extent, copy=False).open()
        return opened


def main(
    connection: Connection,
    slots: list[MemoryFile],
    definition: Definition,
    device: str,
    threads: int,
    environment: dict[str, str],
) -> None:
    """A worker process, until the parent closes its end of the pipe."""
    fork_server.begin_worker()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it may be terminated: what it had is repeated
    for name in os.environ.keys() - environment.keys():  # the fork server's environment may be older
        del os.environ[name]
    os.environ.update(environment)
    np.random.seed()  # the server's state would be every worker's
    torch.set_num_threads(threads)
    try:
        caller = Caller(*definition.open(), torch.device(device))
    except BaseException as error:
        _send(connection, Message(store(pack(Failure.of(error)), slots[0]), Kind.BROKEN, 0))
        return
    _Here.device = caller.device  # for threads that the worker starts
    if _send(connection, Message(Extent(), Kind.READY, 0)):
        serve(connection, slots, caller)
    sys.stdout.flush()
    sys.stderr.flush()


Opener = Callable[[], Any]  # unpickles a message's batch or job


def serve(connection: Connection, slots: list[MemoryFile], caller: Caller) -> None:
    """Answer batches and jobs, in order."""
    arrived = _arrivals(connection, slots, caller)
    for message, items in _ahead(arrived, caller) if caller.prepares else arrived:
        began = time.perf_counter()
        if message.kind == Kind.JOB:
            result = _packable(caller.job(items))
            answer, failures = pack(result), int(type(result) is Failure)
        else:
            answer, failures = _batch(caller, items)
        extent = store(answer, slots[message.slot], message.extent.end)
        done = message._replace(extent=extent, failures=failures, seconds=time.perf_counter() - began)
        usable = not failures or caller.usable()
        del items, answer
        if not _send(connection, done) or not usable:
            return


def _arrivals(connection: Connection, slots: list[MemoryFile], caller: Caller) -> Iterator[tuple[Message, Opener]]:
    """Messages until the parent closes the pipe."""
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            return
        job = message.kind == Kind.JOB
        items = fetch(slots[message.slot].reach(message.extent.end), message.extent, copy=job).open
        yield message, caller.prepared(items) if caller.prepares and not job else items
        del items


def _ahead(arrived: Iterator[tuple[Message, Opener]], caller: Caller) -> Iterator[tuple[Message, Opener]]:
    """The same, received by a thread, which prepares batches; the parent sends no more than it has slots."""
    received: queue.SimpleQueue[tuple[Message, Opener] | None] = queue.SimpleQueue()

    def listen() -> None:
        try:
            enter(caller.device)
            for message in arrived:
                received.put(message)
                del message  # or this thread keeps its batch's memory
        finally:  # also after an error: the worker then ends, and is replaced
            received.put(None)

    threading.Thread(target=listen, name="listening", daemon=True).start()
    return iter(received.get, None)


def _send(connection: Connection, message: Message) -> bool:
    """False where the parent has closed the pipe."""
    try:
        connection.send(message)
    except OSError:
        return False
    return True


def _batch(caller: Caller, items: Opener) -> tuple[Packed, int]:
    results = caller.batch(items)
    if not (isinstance(results, list) and any(type(result) is Failure for result in results)):
        with suppress(BaseException):  # one does not pickle
            return pack_rows(results), 0
    results = [_packable(result) for result in results]
    return pack(results), sum(type(result) is Failure for result in results)


def _packable(result: Any) -> Any:
    """A result, or a `Failure` in its place where it does not pickle."""
    try:
        pack(result)
    except BaseException as error:
        return Failure.of(error)
    return result

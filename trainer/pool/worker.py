"""The worker process: calls the user's worker on one device, and answers the parent's messages."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
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
    """Kind of a message.

    READY reports that the worker's setup succeeded, and BROKEN that it failed. BATCH and JOB are
    the kinds of tasks, and of the answers to them.
    """

    READY = 0
    BROKEN = 1
    BATCH = 2
    JOB = 3


class _Here(threading.local):
    device: torch.device | None = None


_here = _Here()


def current_device() -> torch.device:
    """Return the device of the `DevicePool` worker that calls this function.

    Raises:
        RecipeError: the caller is not a worker of a pool.
    """
    if _here.device is None:
        raise RecipeError(
            "current_device() works in a DevicePool's workers only: call it in a function that the "
            "pool runs"
        )
    return _here.device


def enter(device: torch.device) -> None:
    """Make a device current in this thread, for `current_device` and for CUDA."""
    _here.device = device
    if device.type == "cuda":
        torch.cuda.set_device(device)


class Caller:
    """Calls the user's worker for batches and jobs, and converts exceptions to `Failure`s."""

    def __init__(
        self, worker: Callable[..., Any], arguments: Sequence[Any], device: torch.device
    ) -> None:
        """Create the user's worker and call its setup."""
        enter(device)
        self.device = device
        self.worker: Any = worker(*arguments) if isinstance(worker, type) else worker
        if hasattr(self.worker, "setup"):
            self.worker.setup(device)

    @property
    def prepares(self) -> bool:
        """Whether the user's worker prepares a batch while it still computes another."""
        return hasattr(self.worker, "prepare")

    def prepare(self, items: Callable[[], Sequence[Any]]) -> Callable[[], Sequence[Any]]:
        """Prepare a batch, and return a function for `batch` that returns the prepared items.

        The function raises the exception of the preparation, if any.
        """
        prepared: Future[Sequence[Any]] = Future()
        try:
            prepared.set_result(self.worker.prepare(items()))
        except BaseException as error:
            prepared.set_exception(error)
        return prepared.result

    def batch(self, items: Callable[[], Sequence[Any]]) -> Any:
        """Compute a batch.

        Args:
            items: function that returns the items.

        Returns:
            A result or a `Failure` for each item, or a list of one `Failure` for the whole batch.
        """
        try:
            enter(self.device)
            values = items()
            if hasattr(self.worker, "batch"):
                return _check_results(self.worker.batch(values), len(values))
        except BaseException as error:
            return [Failure.of(error, whole=True)]
        return [*map(self._compute_item, values)]

    def _compute_item(self, item: Any) -> Any:
        try:
            return self.worker(item)
        except BaseException as error:
            return Failure.of(error)

    def job(
        self, call: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]
    ) -> Any:
        """Run a job, and return its result or a `Failure`.

        Args:
            call: function that returns the job's function with its positional and keyword
                arguments.
        """
        try:
            enter(self.device)
            function, arguments, keywords = call()
            return function(*arguments, **keywords)
        except BaseException as error:
            return Failure.of(error)

    def usable(self) -> bool:
        """Return whether the device still works after a failure.

        Some CUDA errors make the device unusable for the rest of the process.
        """
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception:
            return False
        return True


def _check_results(results: Any, count: int) -> Any:
    if isinstance(results, dict | str | bytes) or not hasattr(results, "__len__"):
        kind = type(results).__name__
        raise TypeError(
            f"batch() returned a {kind}: return a list of {count} results, or a tensor of shape "
            f"({count}, ...)"
        )
    if not isinstance(results, torch.Tensor | np.ndarray):
        results = list(results)
    if len(results) != count:
        raise ValueError(
            f"batch() returned {len(results)} results for {count} items: return one for each, in "
            "order"
        )
    return results


# --- the process
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """The user's worker and its arguments in shared memory.

    The worker and the arguments are pickled once, and every process maps the same memory, so
    weights are in memory only once.

    Attributes:
        slot: shared memory with the pickled worker and arguments.
        extent: position of the pickled worker and arguments in `slot`.
    """

    slot: MemoryFile
    extent: Extent

    @classmethod
    def of(cls, worker: Callable[..., Any], arguments: Sequence[Any]) -> Definition:
        """Pickle a worker and its arguments."""
        slot = new_slot()
        return cls(slot, store(pack((worker, tuple(arguments))), slot))

    def open(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Unpickle the worker and its arguments.

        Tensors are views of the shared memory. Pages to which this process writes are copied for
        this process.
        """
        packed = fetch(self.slot.private(), self.extent, copy=False)
        worker_and_arguments: tuple[Callable[..., Any], tuple[Any, ...]] = packed.open()
        return worker_and_arguments


def main(
    connection: Connection,
    slots: list[MemoryFile],
    definition: Definition,
    device: str,
    threads: int,
    environment: dict[str, str],
) -> None:
    """Run a worker process until the parent closes its end of the pipe.

    Args:
        connection: the worker's end of the pipe.
        slots: shared memory for tasks and answers.
        definition: the user's worker and its arguments.
        device: name of the device.
        threads: number of threads for torch.
        environment: environment variables of the parent.
    """
    fork_server.begin_worker()
    # SIGTERM may end this process at any time: the pool repeats its tasks.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The environment of the fork server may be older than that of the parent.
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    # Seed NumPy again, because forked workers all start with the random state of the fork server.
    np.random.seed()
    torch.set_num_threads(threads)
    try:
        caller = Caller(*definition.open(), torch.device(device))
    except BaseException as error:
        _send(connection, Message(store(pack(Failure.of(error)), slots[0]), Kind.BROKEN, 0))
        return
    # Make `current_device` work in threads that the user's worker starts.
    _Here.device = caller.device
    if _send(connection, Message(Extent(), Kind.READY, 0)):
        serve(connection, slots, caller)
    sys.stdout.flush()
    sys.stderr.flush()


# Function that returns the items of a batch (prepared, if the user's worker has `prepare`), or a
# job's function with its positional and keyword arguments.
Opener = Callable[[], Any]


def serve(connection: Connection, slots: list[MemoryFile], caller: Caller) -> None:
    """Compute batches and jobs in the order of their arrival, and send the answers."""
    tasks = _receive_tasks(connection, slots, caller)
    if caller.prepares:
        tasks = _receive_ahead(tasks, caller)
    for message, items in tasks:
        start = time.perf_counter()
        if message.kind == Kind.JOB:
            result = _ensure_picklable(caller.job(items))
            packed = pack(result)
            failures = int(type(result) is Failure)
        else:
            packed, failures = _compute_batch(caller, items)
        extent = store(packed, slots[message.slot], message.extent.end)
        seconds = time.perf_counter() - start
        answer = message._replace(extent=extent, failures=failures, seconds=seconds)
        is_usable = not failures or caller.usable()
        del items, packed
        if not _send(connection, answer) or not is_usable:
            return


def _receive_tasks(
    connection: Connection, slots: list[MemoryFile], caller: Caller
) -> Iterator[tuple[Message, Opener]]:
    """Yield each message of the parent with a function that returns the items, or the job's call.

    The iterator ends when the parent closes the pipe.
    """
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            return
        is_job = message.kind == Kind.JOB
        extent = message.extent
        items = fetch(slots[message.slot].reach(extent.end), extent, copy=is_job).open
        if caller.prepares and not is_job:
            items = caller.prepare(items)
        yield message, items
        # Free the batch before waiting for the next message.
        del items


def _receive_ahead(
    tasks: Iterator[tuple[Message, Opener]], caller: Caller
) -> Iterator[tuple[Message, Opener]]:
    """Return an iterator over `tasks`, which a new thread receives and prepares.

    The calling thread can compute meanwhile. The queue between the two threads cannot grow without
    limit, because the parent sends at most one task per slot.
    """
    received: queue.SimpleQueue[tuple[Message, Opener] | None] = queue.SimpleQueue()

    def listen() -> None:
        try:
            enter(caller.device)
            for task in tasks:
                received.put(task)
                # Drop the reference, which would keep the batch's memory until the next task.
                del task
        finally:
            # None ends the worker's loop. After an error, the process then ends, and the pool
            # replaces it.
            received.put(None)

    threading.Thread(target=listen, name="listening", daemon=True).start()
    return iter(received.get, None)


def _send(connection: Connection, message: Message) -> bool:
    """Send a message. Return False if the parent has closed the pipe."""
    try:
        connection.send(message)
    except OSError:
        return False
    return True


def _compute_batch(caller: Caller, items: Opener) -> tuple[Packed, int]:
    """Compute a batch, and return the pickled results and the number of failures among them."""
    results = caller.batch(items)
    if not (isinstance(results, list) and any(type(result) is Failure for result in results)):
        # If a result does not pickle, the lines below find it and replace it by a `Failure`.
        with suppress(BaseException):
            return pack_rows(results), 0
    results = [*map(_ensure_picklable, results)]
    return pack(results), sum(type(result) is Failure for result in results)


def _ensure_picklable(result: Any) -> Any:
    """Return `result`, or a `Failure` if it cannot be pickled."""
    try:
        pack(result)
    except BaseException as error:
        return Failure.of(error)
    return result

"""`DevicePool`: workers on a list of devices, for streams of items and for jobs."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing import util  # util's own exit handler comes after ours, for ours is registered later
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trainer.devices.assignment import present
from trainer.errors import RecipeError, SetupError
from trainer.pool.batching import Batching
from trainer.pool.engine import Engine
from trainer.pool.failures import ItemError
from trainer.pool.handles import ProcessHandle
from trainer.pool.scheduler import Scheduler, Seat
from trainer.pool.stream import as_it_is
from trainer.pool.transport import pack
from trainer.pool.worker import Definition
from trainer.processes import fork_server, pickling
from trainer.processes.resources import cuda_for

MOVE = "move what does not pickle to the top of a module, or undecorate it"
_open: weakref.WeakSet[Engine] = weakref.WeakSet()


class DevicePool:
    """Workers on devices that process a stream of items in order, as fast as all devices together can.

        with DevicePool(["cuda:0", "cuda:1", "cpu"], Classifier, arguments=(model,)) as pool:
            for label in pool.map(photos):
                ...

    A worker is a class, made in the worker process as `worker(*arguments)`, with

        setup(device)   optional; called once, with the `torch.device`
        __call__(item)  one result, or
        batch(items)    a list of results, or a tensor or array of shape (len(items), ...)
        prepare(items)  optional, beside `batch`, which gets what this returns, as many: called when a batch arrives,
                        in another thread, while the worker still computes the one before

    or a plain function of an item. It may be called again for an item whose worker was lost. Items given to a worker
    are views of shared memory, valid during the call: clone what is kept. Gradients are not sent, sparse tensors are
    refused, results are on the CPU and own their memory.

    Args:
        devices: one worker each, as "cpu" or "cuda:1"; a device may come several times. A worker has as many threads as
            OMP_NUM_THREADS says, or else its part of the cores.
        worker: the class or function. It must pickle: defined at the top of a module.
        arguments: of the class. Their tensors are in memory once for all processes (a process that writes to them
            gets its own copy of those pages).
        batch_size: items of every batch, in the order of the stream, so that results do not depend on the devices or
            their number; None lets each device's batches grow to what it handles best, and follow its speed.
        assign: "free" gives work to whichever worker is free, "round_robin" in turn: item i (with a `batch_size`,
            batch i) and job i to worker i % len(devices).
        start_method: "forkserver" (each start takes a tenth of a second) or "spawn".
        item_timeout: seconds an item may take until its worker counts as hung and is replaced; None: for ever. A batch
            may take that long and four times what it usually takes. Jobs may take as long as they like.
        retries: how often an item is tried. A failed batch is repeated item by item; one whose worker died is repeated
            as it is, and item by item, once, after so many workers died.
        on_error: what `map` does about an item that failed every time: "raise" its `ItemError`, or "skip" it, which
            yields the `ItemError` in the result's place.

    Raises:
        RecipeError: a device that is not here, arguments that cannot mean anything, or a worker that does not pickle:
            before anything starts.
    """

    def __init__(
        self,
        devices: Sequence[str | torch.device],
        worker: Callable[..., Any],
        *,
        arguments: tuple[Any, ...] = (),
        batch_size: int | None = None,
        assign: Literal["free", "round_robin"] = "free",
        start_method: Literal["forkserver", "spawn"] = "forkserver",
        item_timeout: float | None = 60.0,
        retries: int = 3,
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        checked = check_devices(devices)
        _check_worker(worker, arguments)
        choices = ("assign", assign, "free", "round_robin"), ("on_error", on_error, "raise", "skip")
        for name, value, *allowed in (*choices, ("start_method", start_method, "forkserver", "spawn")):
            if value not in allowed:
                raise RecipeError(f"{name}={value!r} of a DevicePool: use {' or '.join(map(repr, allowed))}")
        if min(batch_size or 1, retries, 1 if item_timeout is None else item_timeout) <= 0 or batch_size == 0:
            raise RecipeError("batch_size, retries and item_timeout of a DevicePool must be positive")
        self._skip = on_error == "skip"
        start = _starter(start_method, worker, arguments, len(checked))
        seats = [Seat(index, str(device)) for index, device in enumerate(checked)]
        batching = Batching([device.type for device in checked], batch_size)
        scheduler = Scheduler(seats, batching, assign == "round_robin", retries)
        self._engine = Engine(start, scheduler, item_timeout)
        _open.add(self._engine)
        self._finalizer = weakref.finalize(self, self._engine.close)

    def map(self, items: Iterable[Any], *, ordered: bool = True) -> Iterator[Any]:
        """A stream of results, one for each item, with a bounded number of items in flight.

        The iterable is read in the caller's thread, as results are consumed; it may be infinite. The iterator need not
        be consumed to its end.

        Args:
            items: tensors, arrays, nested dicts, lists and tuples of them, whatever pickles. A stream may fill the same
                tensors and arrays again for each item; other objects are to stay as they are until their result comes.
            ordered: in the items' order; else as they are computed.

        Raises:
            ItemError: with on_error="raise", in place of the failed item's result.
            PredictionError: a worker's setup failed, or the pool was closed.
            Exception: what the iterable raised, after the results of the items before.
        """
        # What is there at once is not filled again; a stream's items may be one buffer.
        source = iter(items) if isinstance(items, Tensor | np.ndarray | list | tuple) else map(as_it_is, items)
        self._engine.check()
        return self._results(source, ordered)

    def _results(self, source: Iterator[Any], ordered: bool) -> Iterator[Any]:
        stream = self._engine.add_stream(ordered)
        taken = given = 0
        broken: Exception | None = None  # what the iterable raised, to be raised after the results before
        try:
            while True:
                results = stream.get()
                if results is None:
                    if stream.ended and given == taken:
                        if broken:
                            raise broken
                        return
                    if stream.ended or taken - given >= stream.window:
                        stream.wait()
                        continue
                    try:
                        stream.put(taken, next(source))
                        taken += 1
                    except Exception as error:
                        broken = None if isinstance(error, StopIteration) else error
                        stream.end()
                elif not isinstance(results, ItemError):
                    given += len(results)
                    yield from results
                elif self._skip:
                    given += 1
                    yield results
                else:
                    raise results
        finally:
            broken = None  # its traceback holds this frame
            self._engine.close_stream(stream)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run one job on a worker, whose CUDA device is current meanwhile; `current_device()` returns it.

        An exception is set on the Future with the worker's traceback as a note. A job whose worker is lost is repeated.

        Raises:
            RecipeError: the job does not pickle.
        """
        _check_importable(function)
        try:
            call = pack((function, args, kwargs))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise _unpicklable(function, error) from error
        return self._engine.add_job(call)

    def figures(self) -> list[dict[str, Any]]:
        """One dict for each worker: device, items (done), items_per_sec (while busy), queue (items that it has),
        batch_size (at present), replaced (how often)."""
        batching = self._engine.scheduler.batching
        return [
            {
                "device": seat.device,
                "items": seat.done,
                "items_per_sec": batching.speeds[seat.index].rate,
                "queue": seat.held,
                "batch_size": batching.size(seat.index),
                "replaced": seat.replaced,
            }
            for seat in self._engine.seats
        ]

    def close(self) -> None:
        """End all workers, within seconds; unfinished iterators and Futures get an error."""
        self._finalizer()

    def __enter__(self) -> DevicePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- arguments, and how workers start ---------------------------------------------------------------------------------


def check_devices(devices: Sequence[str | torch.device]) -> list[torch.device]:
    """Devices by name. Raises RecipeError for what names none that this machine has, SetupError for broken cards."""
    if isinstance(devices, str | torch.device) or not devices:
        raise RecipeError(f"devices={devices!r} of a DevicePool: give a list, as ['cuda:0', 'cpu'], one worker each")
    names = list(map(str, devices))
    return [torch.device(name) for name in present(names, cuda_for(names))]


def _check_worker(worker: Any, arguments: Sequence[Any]) -> None:
    """Raises RecipeError unless a pool can call it."""
    name = _name(worker)
    kinds = [vars(base) for base in worker.__mro__] if isinstance(worker, type) else []
    methods = any(method in kind for kind in kinds for method in ("__call__", "batch"))
    if not (methods if kinds else callable(worker) or hasattr(worker, "batch")):
        raise RecipeError(f"worker {name} cannot be called: give it __call__(self, item) or batch(self, items)")
    if arguments and not kinds:
        raise RecipeError(f"arguments are for a worker class, and {name} is none: use functools.partial")


def _check_importable(function: Any) -> None:
    """Raises RecipeError for a function of an interactive session, which another process cannot import."""
    main: Any = sys.modules["__main__"]
    pickling.forget_stdin()
    here = getattr(function, "__module__", None) == "__main__" and not isinstance(function, partial)
    if here and not hasattr(main, "__file__") and getattr(main, "__spec__", None) is None:
        raise RecipeError(
            f"{_name(function)} is defined in an interactive session, where workers cannot find it: {MOVE}"
        )


def _unpicklable(function: Any, error: BaseException) -> RecipeError:
    text = " ".join(str(error).split())
    hint = "" if ".to_dense()" in text else f": {MOVE}"
    return RecipeError(f"{_name(function)} cannot be sent to another process: {text}{hint}")


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", repr(function)))


def _starter(
    method: str, worker: Callable[..., Any], arguments: Sequence[Any], count: int
) -> Callable[[Seat], ProcessHandle]:
    """A function that starts the worker of a seat. Raises RecipeError for what does not pickle."""
    _check_importable(worker)
    try:
        definition = Definition.of(worker, arguments)
    except SetupError:
        raise
    except Exception as error:
        raise _unpicklable(worker, error) from error
    spawn = method == "spawn"
    context: Any = multiprocessing.get_context("spawn") if spawn else fork_server.context("trainer.pool.worker")
    threads = threads_each(count)
    return lambda seat: ProcessHandle(context, definition, seat.device, threads, f"DevicePool-{seat.index}")


def threads_each(workers: int) -> int:
    """Threads of a worker: OMP_NUM_THREADS where the user set it, else this process's cores divided by workers."""
    wish = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(wish) if wish.isdigit() and int(wish) else max(1, len(os.sched_getaffinity(0)) // workers)


# --- the end ----------------------------------------------------------------------------------------------------------


@atexit.register
def end_of_program() -> None:
    """End all workers of this process."""
    for engine in list(_open):
        engine.close()


assert util  # imported for the order of exit handlers

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

# Import multiprocessing.util before this module registers its exit handler: handlers run in reverse
# order, so the pool ends its workers before multiprocessing joins all children.
from multiprocessing import util
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trainer.devices.assignment import resolve_devices
from trainer.errors import RecipeError, SetupError, read_line
from trainer.pool.batching import Batching
from trainer.pool.engine import Engine
from trainer.pool.failures import ItemError
from trainer.pool.handles import ProcessHandle
from trainer.pool.scheduler import PoolWorker, Scheduler
from trainer.pool.stream import copy_item
from trainer.pool.transport import pack
from trainer.pool.worker import Definition
from trainer.processes import fork_server, pickling
from trainer.processes.resources import count_cores, count_cuda_devices
from trainer.processes.torch_context import plain_context

PICKLE_HINT = "define the function or class at the top of a module, without a decorator"
# Engines of all pools of this process.
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class DevicePool:
    """Worker processes on any list of devices, for streams of items and for jobs.

    The devices share the work according to their speed, and results come in the order of the items.
    No item is lost if a worker process dies.

        with DevicePool(["cuda:0", "cuda:1", "cpu"], Classifier, arguments=(model,)) as pool:
            for label in pool.map(photos):
                ...

    A worker is a function of one item, or a class. The pool creates an instance of the class in
    each worker process, `worker(*arguments)`, and calls these methods:

        setup(device)   Optional. Called once, with a `torch.device`.
        __call__(item)  Return the result of one item.
        batch(items)    Return the results of several items: a list, or a tensor or array of shape
                        (len(items), ...). Called instead of `__call__` if it exists.
        prepare(items)  Optional, for classes with `batch`: return one prepared item per item, which
                        `batch` then receives. Called in a second thread when a batch arrives, while
                        the worker still computes the previous batch.

    A worker may be called several times for one item, for example after an exception or after a
    process was lost. Tensors and arrays in items are views of shared memory that are valid during
    the call only: clone what you keep. Gradients are not sent. Sparse tensors are refused. Results
    are on the CPU and own their memory.

    Args:
        devices: names such as "cpu" or "cuda:1". Each entry starts one worker, and a device may be
            listed several times. A worker uses OMP_NUM_THREADS threads; if that variable is not
            set, the workers divide the cores of this process equally.
        worker: the function or class. It must be picklable, so define it at the top of a module.
        arguments: arguments of the class. Their tensors are in memory once for all processes; a
            process that writes to a tensor gets its own copy of the changed pages.
        batch_size: number of items in every batch. Batches consist of consecutive items, so results
            do not depend on the devices. None chooses the size for each device and adapts it to the
            device's speed.
        assign: "free" assigns work to any free worker. "round_robin" assigns item i (or batch i, if
            `batch_size` is set) and job i to worker i % len(devices).
        start_method: "forkserver", with which a worker starts in a tenth of a second, or "spawn".
        item_timeout: maximum seconds per item, after which the worker process counts as hung and is
            replaced; None for no limit. A batch of n items may take n times `item_timeout`, but
            at most `item_timeout` plus four times its usual time once the speed of the device is
            known. The limit does not apply to jobs.
        retries: maximum number of tries per item. The items of a failed batch are repeated
            separately. A batch whose process died is repeated unchanged; after `retries` deaths,
            its items are repeated separately, once.
        on_error: what `map` does with an item that failed in every try: "raise" raises its
            `ItemError`, "skip" yields the `ItemError` instead of the result.

    Raises:
        RecipeError: a device does not exist, an argument is not valid, or the worker cannot be
            pickled. The error is raised before any process starts.
    """

    @plain_context()
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
        checked_devices = check_devices(devices)
        _check_worker(worker, arguments)
        _check_choice("assign", assign, "free", "round_robin")
        _check_choice("on_error", on_error, "raise", "skip")
        _check_choice("start_method", start_method, "forkserver", "spawn")
        for number in (batch_size, retries, item_timeout):
            if number is not None and number <= 0:
                raise RecipeError(
                    "batch_size, retries and item_timeout of a DevicePool must be positive"
                )
        self._skip = on_error == "skip"
        _check_importable(worker)
        try:
            definition = Definition.of(worker, arguments)
        except SetupError:
            raise
        except Exception as error:
            raise _pickling_error(worker, error) from error
        context: Any
        if start_method == "spawn":
            context = multiprocessing.get_context("spawn")
        else:
            context = fork_server.start_server("trainer.pool.worker")
        threads = count_threads(len(checked_devices))

        def start(pool_worker: PoolWorker) -> ProcessHandle:
            name = f"DevicePool-{pool_worker.index}"
            return ProcessHandle(context, definition, pool_worker.device, threads, name)

        workers = [PoolWorker(index, str(device)) for index, device in enumerate(checked_devices)]
        batching = Batching([device.type for device in checked_devices], batch_size)
        scheduler = Scheduler(workers, batching, assign == "round_robin", retries)
        self._engine = Engine(start, scheduler, item_timeout)
        _engines.add(self._engine)
        self._finalizer = weakref.finalize(self, self._engine.close)

    def map(self, items: Iterable[Any], *, ordered: bool = True) -> Iterator[Any]:
        """Return an iterator over the results, one for each item.

        The number of items in flight is bounded: the caller's thread reads `items` while the caller
        consumes results, so `items` may be infinite. The iterator may be abandoned before its end.

        Args:
            items: tensors, arrays, nested dicts, lists and tuples of them, or any picklable
                objects. A generator may overwrite the same tensors and arrays for each item. Other
                objects must not change before their results arrive.
            ordered: True for results in the order of the items, False for results in the order in
                which they are computed.

        Raises:
            ItemError: an item failed, with on_error="raise".
            PredictionError: the setup of a worker failed, or the pool was closed.
            TrainerError: the setup of a worker raised this error.
            Exception: an exception of `items`, raised after the results of all previous items.
        """
        # Items of a sequence exist at the same time. Other iterables may reuse one buffer, so their
        # items are copied.
        if isinstance(items, Tensor | np.ndarray | list | tuple):
            source = iter(items)
        else:
            source = map(copy_item, items)
        self._engine.check()
        return self._results(source, ordered)

    def _results(self, source: Iterator[Any], ordered: bool) -> Iterator[Any]:
        stream = self._engine.add_stream(ordered)
        item_count = 0
        result_count = 0
        # An exception of `source`, which is raised after the results of all previous items.
        source_error = None
        try:
            while True:
                results = stream.get()
                if results is None:
                    if stream.ended and result_count == item_count:
                        if source_error:
                            raise source_error
                        return
                    if stream.ended or item_count - result_count >= stream.window:
                        stream.wait()
                        continue
                    try:
                        stream.put(item_count, next(source))
                        item_count += 1
                    except StopIteration:
                        stream.end()
                    except Exception as error:
                        source_error = error
                        stream.end()
                elif not isinstance(results, ItemError):
                    result_count += len(results)
                    yield from results
                elif self._skip:
                    result_count += 1
                    yield results
                else:
                    raise results
        finally:
            # The traceback of the exception references this frame: break the cycle.
            source_error = None
            self._engine.close_stream(stream)

    @plain_context()
    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run one job, `function(*args, **kwargs)`, on a worker.

        While the job runs, `current_device()` returns the worker's device. If this device is a GPU,
        it is also the current CUDA device. If the process is lost, the job is repeated, up to
        `retries` tries.

        Returns:
            A Future. An exception of the job is set on it, with the worker's traceback as a note.

        Raises:
            RecipeError: the job cannot be pickled.
        """
        _check_importable(function)
        try:
            call = pack((function, args, kwargs))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise _pickling_error(function, error) from error
        return self._engine.add_job(call)

    def figures(self) -> list[dict[str, Any]]:
        """Return one dict of measurements for each worker.

        Returns:
            Dicts with the keys "device", "items" (number of items and jobs done), "items_per_sec"
            (speed while the worker computes), "queue" (number of items in its queue), "batch_size"
            (present number of items per batch) and "replaced" (number of lost processes).
        """
        batching = self._engine.scheduler.batching
        return [
            {
                "device": worker.device,
                "items": worker.done,
                "items_per_sec": batching.speeds[worker.index].rate,
                "queue": worker.queued_items,
                "batch_size": batching.size(worker.index),
                "replaced": worker.replaced,
            }
            for worker in self._engine.workers
        ]

    def close(self) -> None:
        """End all workers within seconds, and set an error on unfinished iterators and Futures."""
        self._finalizer()

    def __enter__(self) -> DevicePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- checks of arguments
# --------------------------------------------------------------------------------------------------


def check_devices(devices: Sequence[str | torch.device]) -> list[torch.device]:
    """Return the devices that `devices` names.

    Raises:
        RecipeError: this machine does not have one of the devices.
        SetupError: a GPU does not work.
    """
    if isinstance(devices, str | torch.device) or not devices:
        raise RecipeError(
            f"devices={devices!r} of a DevicePool: pass a list with one entry per worker, such as "
            "['cuda:0', 'cpu']"
        )
    names = list(map(str, devices))
    return [torch.device(name) for name in resolve_devices(names, count_cuda_devices(names))]


def _check_choice(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise RecipeError(
            f"{name}={value!r} of a DevicePool: use {' or '.join(map(repr, allowed))}"
        )


def _check_worker(worker: Any, arguments: Sequence[Any]) -> None:
    """Raise RecipeError if a pool cannot call the worker."""
    name = _name(worker)
    is_class = isinstance(worker, type)
    if is_class:
        # Every class is callable, because a call creates an instance. So look for the methods of
        # its instances.
        methods = set().union(*map(vars, worker.__mro__))
        can_call = not methods.isdisjoint(("__call__", "batch"))
    else:
        can_call = callable(worker) or hasattr(worker, "batch")
    if not can_call:
        raise RecipeError(
            f"worker {name} cannot be called: define __call__(self, item) or batch(self, items)"
        )
    if arguments and not is_class:
        raise RecipeError(
            f"arguments are for a worker class, but {name} is not a class: use functools.partial"
        )


def _check_importable(function: Any) -> None:
    """Raise RecipeError for a function of an interactive session.

    Another process cannot import such a function.
    """
    main = sys.modules["__main__"]
    pickling.forget_stdin()
    if getattr(function, "__module__", None) != "__main__" or isinstance(function, partial):
        return
    if not hasattr(main, "__file__") and getattr(main, "__spec__", None) is None:
        raise RecipeError(
            f"{_name(function)} is defined in an interactive session, where workers cannot find "
            f"it: {PICKLE_HINT}"
        )


def _pickling_error(function: Any, error: BaseException) -> RecipeError:
    text = read_line(error)
    # The message about sparse tensors already says what to type, so it gets no hint.
    if ".to_dense()" not in text:
        text += f": {PICKLE_HINT}"
    return RecipeError(f"{_name(function)} cannot be sent to another process: {text}")


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", repr(function)))


def count_threads(workers: int) -> int:
    """Return the number of threads of each worker.

    The result is OMP_NUM_THREADS if the user has set it, or the cores of this process divided by
    `workers`.
    """
    setting = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if setting.isdigit() and int(setting):
        return int(setting)
    return max(1, count_cores() // workers)


# --- the end of the program
# --------------------------------------------------------------------------------------------------


@atexit.register
def end_of_program() -> None:
    """End the workers of all pools of this process."""
    for engine in list(_engines):
        engine.close()


# `util` is imported only for the order of exit handlers. This statement uses the import, so that
# linters do not report it.
assert util

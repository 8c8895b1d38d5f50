"""Streams of `map` and jobs of `submit`, which connect callers with the engine's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_map

from trainer.errors import PredictionError
from trainer.pool.failures import Failure, ItemError


def copy_item(item: Any) -> Any:
    """Return an item with copies of its tensors and arrays.

    The caller's iterable may overwrite the same tensors with its next item before `item` is sent.
    """
    if isinstance(item, dict | list | tuple):
        return tree_map(_copy_leaf, item)
    return _copy_leaf(item)


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.clone()
    if isinstance(leaf, np.ndarray | bytearray):
        return leaf.copy()
    return leaf


@dataclass(eq=False)
class Lane:
    """A queue of items with their indices: all items of a stream, or those of one worker.

    Attributes:
        next: index of the first item in the queue, or of the next item to come if the queue is
            empty.
        step: difference between the indices of consecutive items.
        skip: additional difference between the indices of the last item of a chunk and of the first
            item of the next chunk.
        items: the items.
    """

    next: int = 0
    step: int = 1
    skip: int = 0
    items: deque[Any] = field(default_factory=deque)

    def take(self, count: int, stream: Stream) -> Chunk:
        """Remove the first `count` items and return them as a chunk of `stream`."""
        items = [self.items.popleft() for _ in range(count)]
        indices = range(self.next, self.next + count * self.step, self.step)
        self.next += count * self.step + self.skip
        return Chunk(stream, indices, items)


@dataclass(eq=False)
class Chunk:
    """Items of one stream that a worker computes as one batch.

    Attributes:
        stream: the stream.
        indices: index in the stream of each item.
        items: the items.
        tries: number of tries that failed.
        holders: number of workers that have the chunk.
        done: whether the chunk has an answer, or was split into other chunks.
    """

    stream: Stream
    indices: range
    items: Sequence[Any]
    tries: int = 0
    holders: int = 0
    done: bool = False

    def singles(self, tries: int) -> list[Chunk]:
        """Return one chunk for each item, with `tries` failed tries."""
        pairs = zip(self.indices, self.items, strict=True)
        return [Chunk(self.stream, range(index, index + 1), [item], tries) for index, item in pairs]


class Stream:
    """Items and results of one call of `map`.

    The caller's thread calls `put`, `end`, `get` and `wait`. The engine's thread takes the items,
    and calls `deliver` and `fail`. Both threads only append to deques and pop from them, so no lock
    is needed.

    Attributes:
        window: maximum number of items in flight; the engine changes it.
        again: chunks of each lane to repeat before new items are sent.
        arrived: chunks with their results, in the order of arrival.
        news: event that is set when results or an error arrive.
        wanted: number of items that the engine waits for; 0 if it waits for none.
        since: time at which the engine first saw less than a full batch; 0 if it has not.
        due: time at which the engine will accept less than a full batch; None if it does not wait
            for that time.
        ended: whether the iterable is exhausted.
        waiting: whether the caller waits for results, so that it does not put items in.
        closed: whether the caller needs no more results.
    """

    def __init__(
        self,
        ordered: bool,
        lanes: list[Lane],
        wake: Callable[[], None],
        window: int,
        width: int | None,
    ) -> None:
        """Create a stream without items.

        Args:
            ordered: whether results are returned in the order of the items.
            lanes: one queue, or one for each worker.
            wake: function that wakes the engine's thread.
            window: maximum number of items in flight.
            width: number of items of every batch; None if the number is not fixed.
        """
        self.ordered = ordered
        self.lanes = lanes
        self.wake = wake
        self.window = window
        self.width = width or 1
        self.again: list[deque[Chunk]] = [deque() for _ in lanes]
        self.arrived: deque[tuple[Chunk, Any]] = deque()
        self.news = threading.Event()
        self.error: BaseException | None = None
        self.wanted = 1
        self.since = 0.0
        self.due: float | None = None
        self.ended = False
        self.waiting = False
        self.closed = False
        # Results that arrived before those of earlier items, by the index of their first item.
        self._early: dict[int, Any] = {}
        self._next = 0

    # --- methods for the caller's thread
    # ----------------------------------------------------------------------------------------------

    def put(self, index: int, item: Any) -> None:
        """Add item `index` of the iterable."""
        items = self.lanes[self._lane(index)].items
        items.append(item)
        if self.wanted and (len(items) == self.wanted or len(items) == 1):
            self.wake()

    def end(self) -> None:
        """Report to the engine that the iterable is exhausted."""
        self.ended = True
        self.wake()

    def get(self) -> Any:
        """Return the next results as a list, or the next `ItemError`, or None if neither is there.

        Raises:
            BaseException: the error that ended the pool, once no results are left.
        """
        arrived = self.arrived
        early = self._early
        while arrived:
            chunk, results = arrived.popleft()
            indices = chunk.indices
            if not isinstance(results, ItemError):
                try:
                    results = results()
                except KeyboardInterrupt:
                    raise
                except BaseException as error:
                    # A result does not unpickle: repeat all items separately to find it.
                    if len(indices) > 1:
                        self.again[self._lane(indices.start)].extend(chunk.singles(1))
                        self.wake()
                        continue
                    results = ItemError.of(
                        indices.start, Failure.of(error), "the result does not unpickle: "
                    )
            if not self.ordered:
                return results
            if indices.step == 1 or isinstance(results, ItemError):
                early[indices.start] = results
            else:
                for index, value in zip(indices, results, strict=True):
                    early[index] = [value]
        results = early.pop(self._next, None)
        if results is None and self.error:
            raise self.error
        if results is not None:
            self._next += 1 if isinstance(results, ItemError) else len(results)
        return results

    def _lane(self, index: int) -> int:
        return index // self.width % len(self.lanes)

    def wait(self) -> None:
        """Wait until results or an error arrive."""
        self.waiting = True
        self.news.clear()
        # Check after clearing the event: whatever arrives from now on sets it again.
        if not self.arrived and not self.error:
            self.wake()
            self.news.wait()
        self.waiting = False

    # --- methods for the engine's thread
    # ----------------------------------------------------------------------------------------------

    def deliver(self, chunk: Chunk, results: Any) -> None:
        """Deliver the results of a chunk.

        Args:
            chunk: the chunk.
            results: an `ItemError`, or a function that unpickles the results and returns a list, so
                that unpickling happens in the caller's thread.
        """
        if not self.closed:
            self.arrived.append((chunk, results))
            self.news.set()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error: no more results will arrive."""
        self.error = error
        self.news.set()


@dataclass(eq=False)
class Job:
    """A call of `submit`.

    Attributes:
        future: Future on which the result or the error is set.
        call: the pickled function with its arguments.
        lane: index of the job's queue.
        tries: number of tries in which the worker was lost.
        running: whether the job has been assigned to a worker, so that it cannot be cancelled.
    """

    future: Future[Any]
    call: Any
    lane: int
    tries: int = 0
    running: bool = False


def resolve(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Set the result or error of a Future, unless the Future was cancelled.

    Exceptions that would end a program, such as SystemExit, are set as the cause of a
    `PredictionError`.
    """
    if error is not None and not isinstance(error, Exception):
        cause = error
        error = PredictionError(Failure.of(error).message)
        error.__cause__ = cause
    with suppress(InvalidStateError):
        future.set_exception(error) if error else future.set_result(result)

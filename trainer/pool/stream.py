"""Streams of `map` and jobs of `submit`, between the caller's thread and the engine's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_map

from trainer.errors import PredictionError
from trainer.pool.failures import Failure, ItemError
from trainer.pool.transport import Packed


def as_it_is(item: Any) -> Any:
    """An item with copies of its tensors and arrays: who made it may fill them again before they are sent."""
    return tree_map(_copied, item) if isinstance(item, dict | list | tuple) else _copied(item)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray | bytearray) else leaf


class Lane:
    """A queue of items with their indices: all items of a stream, or every n-th for one worker.

    Indices begin at `first`, are `step` apart, and `skip` more from the end of a batch to the beginning of the next.
    """

    def __init__(self, first: int = 0, step: int = 1, skip: int = 0) -> None:
        self.items: deque[Any] = deque()
        self.next, self.step, self.skip = first, step, skip

    def take(self, count: int, stream: Stream) -> Chunk:
        items = [self.items.popleft() for _ in range(count)]
        indices = range(self.next, self.next + count * self.step, self.step)
        self.next += count * self.step + self.skip
        return Chunk(stream, indices, items)


@dataclass(eq=False)
class Chunk:
    """Items of one stream: a worker's batch."""

    stream: Stream
    indices: range
    items: Sequence[Any]
    tries: int = 0
    holders: int = 0  # workers that have it
    done: bool = False  # answered, or split into other chunks

    def singles(self, tries: int) -> list[Chunk]:
        """Its items, each by itself."""
        pairs = zip(self.indices, self.items, strict=True)
        return [Chunk(self.stream, range(index, index + 1), [item], tries) for index, item in pairs]


class Stream:
    """One `map`. The caller's thread puts items in and takes results out; the engine's thread does the rest.

    Both sides only append to and pop from deques, so there is no lock. There is one lane, or one for each worker;
    `window` items may be in flight, and a batch has `width`, if that is fixed.
    """

    def __init__(
        self, ordered: bool, lanes: list[Lane], wake: Callable[[], None], window: int, width: int | None
    ) -> None:
        self.ordered, self.lanes, self.wake, self.window, self.width = ordered, lanes, wake, window, width or 1
        self.again: list[deque[Chunk]] = [deque() for _ in lanes]  # chunks to be repeated, before new ones, by lane
        self.arrived: deque[tuple[Chunk, Any]] = deque()
        self.news = threading.Event()
        self.error: BaseException | None = None
        self.wanted = 1  # items that the engine waits for; 0: none
        self.since = 0.0  # when the engine first saw less than a full batch
        self.due: float | None = None  # when it takes that
        self.ended = False  # the iterable has no more
        self.waiting = False  # the caller waits for results and puts no items in
        self.closed = False
        self._early: dict[int, Any] = {}
        self._next = 0

    def put(self, index: int, item: Any) -> None:
        """Caller's side: item `index` of the iterable."""
        items = self.lanes[self._lane(index)].items
        items.append(item)
        if self.wanted and (len(items) == self.wanted or len(items) == 1):
            self.wake()

    def end(self) -> None:
        """Caller's side: there are no more items."""
        self.ended = True
        self.wake()

    def get(self) -> Any:
        """Caller's side: the next results (a list), the next `ItemError`, or None if there are none yet."""
        arrived, early = self.arrived, self._early
        while arrived:
            chunk, results = arrived.popleft()
            indices = chunk.indices
            if not isinstance(results, ItemError):
                try:
                    results = results()
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # one does not unpickle
                    if len(indices) > 1:  # find which
                        self.again[self._lane(indices.start)].extend(chunk.singles(1))
                        self.wake()
                        continue
                    failure = Failure.of(error)
                    message = f"the result does not unpickle: {failure.message}"
                    results = ItemError.of(indices.start, replace(failure, message=message))
            if not self.ordered:
                return results
            if indices.step == 1 or isinstance(results, ItemError):
                early[indices.start] = results
            else:
                early.update((index, [value]) for index, value in zip(indices, results, strict=True))
        results = early.pop(self._next, None)
        if results is None and self.error:
            raise self.error
        if results is not None:
            self._next += 1 if isinstance(results, ItemError) else len(results)
        return results

    def _lane(self, index: int) -> int:
        return index // self.width % len(self.lanes)

    def wait(self) -> None:
        """Caller's side: until there are results or an error."""
        self.waiting = True
        self.news.clear()
        if not self.arrived and not self.error:
            self.wake()
            self.news.wait()
        self.waiting = False

    def deliver(self, chunk: Chunk, results: Any) -> None:
        """Engine's side: `results` is a function that returns a list, or an `ItemError`."""
        if not self.closed:
            self.arrived.append((chunk, results))
            self.news.set()

    def fail(self, error: BaseException) -> None:
        """Engine's side: no more results will come."""
        self.error = error
        self.news.set()


@dataclass(eq=False)
class Job:
    """A call of `submit`."""

    future: Future[Any]
    call: Any
    lane: int
    tries: int = 0
    running: bool = False


def finish(future: Future[Any], packed: Packed, failed: int) -> None:
    """Set a job's result or error from its worker's answer."""
    try:
        result = packed.open()
        error = result.exception() if failed else None
    except BaseException as broken:
        result, error = None, broken
    resolve(future, result, error)


def resolve(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Set a Future's result or error, unless it was cancelled; what would end a program, as SystemExit, is a cause."""
    if error is not None and not isinstance(error, Exception):
        cause, error = error, PredictionError(Failure.of(error).message)
        error.__cause__ = cause
    with suppress(InvalidStateError):
        future.set_exception(error) if error else future.set_result(result)

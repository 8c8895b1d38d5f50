"""One `map`: what came in and is not yet out, between the caller's thread and the engine's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.pool.failures import ItemError


class Lane:
    """Items that wait, with the indices they will get: of the whole stream, or every so manieth for one worker.

    Args:
        first: index of the first item.
        step: between one item and the next.
        skip: from the end of one batch to the beginning of the next.
    """

    def __init__(self, first: int = 0, step: int = 1, skip: int = 0) -> None:
        self.items: deque[Any] = deque()
        self.next, self.step, self.skip = first, step, skip

    def take(self, count: int) -> Batch:
        items = [self.items.popleft() for _ in range(count)]
        indices = range(self.next, self.next + count * self.step, self.step)
        self.next += count * self.step + self.skip
        return Batch(indices, items)


@dataclass(eq=False)
class Batch:
    """Items of one stream that are done together."""

    indices: range
    items: Sequence[Any]
    stream: Stream | None = None
    tries: int = 0
    holders: int = 0  # workers that have it
    done: bool = False  # answered, or done again as other batches

    def singles(self, tries: int) -> Iterator[Batch]:
        for index, item in zip(self.indices, self.items, strict=True):
            yield Batch(range(index, index + 1), [item], self.stream, tries)


@dataclass(eq=False)
class Stream:
    """One `map`. The caller's thread puts items in and takes results out; the engine's thread does the rest.

    Both sides only append to and pop from deques, so there is no lock.
    """

    ordered: bool
    lanes: list[Lane]
    wake: Callable[[], None]
    window: int
    lane_of: Callable[[int], int]
    again: list[deque[Batch]] = field(default_factory=list)  # by lane
    arrived: deque[tuple[range, Any]] = field(default_factory=deque)
    news: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    wanted: int = 1  # items that the engine waits for, 0: it does not
    since: float = 0.0  # when the engine first saw items that are less than a batch
    due: float | None = None  # when it will take them nevertheless
    ended: bool = False  # the iterable has no more
    waiting: bool = False  # the caller waits for results, so no item comes meanwhile
    closed: bool = False
    _early: dict[int, Any] = field(default_factory=dict)
    _next: int = 0

    def put(self, index: int, item: Any) -> None:
        """Caller's side: item `index` of the iterable."""
        items = self.lanes[self.lane_of(index)].items
        items.append(item)
        if self.wanted and (len(items) == self.wanted or len(items) == 1):
            self.wake()

    def end(self) -> None:
        """Caller's side: there are no more items."""
        self.ended = True
        self.wake()

    def get(self) -> Any:
        """Caller's side: the next results (a list), the next `ItemError`, or None if they are not there yet."""
        arrived, early = self.arrived, self._early
        while arrived:
            indices, chunk = arrived.popleft()
            if not isinstance(chunk, ItemError):
                try:
                    chunk = chunk()
                except Exception as error:  # it came through pickle there, and does not here
                    text = f"the result does not unpickle: {type(error).__name__}: {error}"
                    arrived.extendleft((range(i, i + 1), ItemError(i, text)) for i in reversed(indices))
                    continue
            if not self.ordered:
                return chunk
            if indices.step == 1 or isinstance(chunk, ItemError):
                early[indices.start] = chunk
            else:
                early.update((index, [value]) for index, value in zip(indices, chunk, strict=True))
        chunk = early.pop(self._next, None)
        if chunk is None and self.error:
            raise self.error
        if chunk is not None:
            self._next += 1 if isinstance(chunk, ItemError) else len(chunk)
        return chunk

    def wait(self) -> None:
        """Caller's side: until there is news."""
        self.waiting = True
        self.news.clear()
        if not self.arrived and not self.error:
            self.wake()
            self.news.wait()
        self.waiting = False

    def deliver(self, indices: range, chunk: Any) -> None:
        """Engine's side: what makes the list of results when it is called, or an `ItemError`."""
        if not self.closed:
            self.arrived.append((indices, chunk))
            self.news.set()

    def fail(self, error: BaseException) -> None:
        """Engine's side: nothing more will come."""
        self.error = error
        self.news.set()

"""The thread between a run and a tracker: it sends values in order, and keeps them while the server is away."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from trainer.errors import text_of
from trainer.processes import interrupts

KEPT = 100_000  # points that wait at most: those of a day, where one is logged each second
TOGETHER = 100  # points that are sent at once, where so many wait
FIRST, LAST = 1.0, 60.0  # seconds between one try and the next: at first, and after many
LATER = (401, 403, 408, 429)  # what a server says that will take the same request at another time


class LoggedStep(NamedTuple):
    """The values of a step, by tag, and when they were logged, in seconds since 1970."""

    values: Mapping[str, float]
    step: int
    when: float


class Sink(Protocol):
    """Where values go; every method may block, may raise anything, and is then called again."""

    def open(self) -> str:
        """Begin a run there, or go on with the one that an earlier part of this run began.

        Returns:
            What people are to know of where the values go; empty where they go where they were asked to.
        """

    def scalars(self, points: Sequence[LoggedStep]) -> None:
        """Values, in the order of their steps; some may be there already."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """The run has ended like this; empty where it ended before its first epoch did."""


class LoggerThread:
    """Gives a sink its values. What fails is tried again until the run has ended, and some seconds more."""

    def __init__(self, name: str, sink: Sink) -> None:
        self._name, self._sink = name, sink
        self._waiting: deque[LoggedStep] = deque()
        self._wake = threading.Event()
        self._news: SimpleQueue[str] = SimpleQueue()
        self._result: Mapping[str, Any] = {}
        self._logged = self._sent = 0
        self._opened = self._ended = self._finished = False
        self._until = 0.0  # when it gives up, by the monotonic clock, once the run has ended
        self._reason = ""
        self._thread = threading.Thread(target=self._work, name=f"logging.{name}", daemon=True)
        self._thread.start()

    def put(self, values: Mapping[str, float], step: int) -> None:
        """Values of a step; returns at once."""
        self._logged += 1
        if len(self._waiting) < KEPT:
            self._waiting.append(LoggedStep(dict(values), step, time.time()))
            self._wake.set()

    def end(self, result: Mapping[str, Any], until: float) -> None:
        """After what is left the end of the run is to be sent, by then."""
        self._result, self._until, self._ended = result, until, True
        self._wake.set()

    def wait(self, patience: float) -> None:
        """Wait for that, and tell what is missing. The time is up after `patience` seconds."""
        self._thread.join(max(0.0, self._until - time.monotonic()))
        if self._thread.is_alive() and not self._reason:
            self._reason = f"it did not take all values within {patience:g} s"
        if self._finished and self._sent == self._logged:
            return
        if not self._finished:
            interrupts.stuck.set()  # its library would wait for it at the end of this process
        lost = self._logged - self._sent
        what = f"lacks {lost:,} of {self._logged:,} logged steps" if lost else "did not get the end of the run"
        self._news.put(f"warning: logging.{self._name} {what} ({self._reason})")

    def news(self) -> Iterator[str]:
        """What people are to know, once."""
        while not self._news.empty():
            yield self._news.get()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        with suppress(_GivenUp, _Refused):
            self._insist(self._open)
            while points := self._next():
                self._send(points)
            self._insist(partial(self._sink.finish, self._result))
            self._finished = True

    def _open(self) -> None:
        if note := self._sink.open():
            self._news.put(f"logging.{self._name}: {note}")
        self._opened = True

    def _next(self) -> list[LoggedStep]:
        """Points that wait, as soon as there are some; none: there will be no more."""
        while not self._waiting:
            if self._ended:
                return []
            self._wake.wait()
            self._wake.clear()
        return [self._waiting[place] for place in range(min(TOGETHER, len(self._waiting)))]

    def _send(self, points: Sequence[LoggedStep]) -> None:
        try:
            self._insist(partial(self._sink.scalars, points))
            self._sent += len(points)
        except _Refused:
            if len(points) > 1:  # one of them is to blame
                for point in points:
                    self._send([point])
                return
        for _ in points:
            self._waiting.popleft()

    def _insist(self, call: Callable[[], None]) -> None:
        """Call it until it works.

        Raises:
            _GivenUp: the run has ended, and the time is up.
            _Refused: the server will never take it.
        """
        pause, warned = FIRST, False
        while True:
            try:
                call()
            except BaseException as error:  # whatever a library and its server may raise, SystemExit too
                self._reason = f"{type(error).__name__}: {' '.join(text_of(error).split())[:200]}"
                if self._opened and _refused(error):
                    raise _Refused from error
            else:
                if warned:
                    self._news.put(f"logging.{self._name} answers again, and has received the kept values")
                return
            if self._ended and (not self._opened or time.monotonic() + FIRST > self._until):
                raise _GivenUp
            if not warned:
                warned = True
                kept = "values are kept and sent again, and the run goes on"
                self._news.put(f"warning: logging.{self._name} does not answer: {kept} ({self._reason})")
            self._pause(pause)
            pause = min(2 * pause, LAST)

    def _pause(self, seconds: float) -> None:
        """Sleep, though not beyond the run's end by more than a second."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._ended:
            self._wake.wait(left)
            self._wake.clear()
        if self._ended:
            time.sleep(min(seconds, FIRST))


class _GivenUp(Exception):
    """The run has ended, and the server has not come back."""


class _Refused(Exception):
    """The server has answered, and will never take this."""


def _refused(error: BaseException) -> bool:
    """As MLflow's errors tell it, by the status of HTTP."""
    try:
        status = int(error.get_http_status_code())  # type: ignore[attr-defined]
    except Exception:
        return False
    return 400 <= status < 500 and status not in LATER

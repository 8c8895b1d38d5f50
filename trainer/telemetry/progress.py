"""Progress of work before the first step, as a bar or as lines."""

from __future__ import annotations

import time

from trainer.telemetry.readable import duration
from trainer.telemetry.tracking import bar_kind

SECONDS, BAR = 10.0, 0.5  # between two lines, or two moves of a bar


class Progress:
    """A bar on a terminal, else a line now and then."""

    def __init__(self, total: int, show: bool, what: str, unit: str, first: float = SECONDS) -> None:
        """`what` is done with `total` things, each a `unit`; lines begin after `first` seconds."""
        bar = bar_kind() if show else None
        self._bar = bar(total=total, unit=unit, desc=what, leave=False) if bar else None
        self._show, self._total, self._done = show, total, 0
        self._what, self._unit = what, unit
        self._start = time.monotonic()
        self._next = self._start + first

    def more(self, count: int = 1) -> None:
        """So many more are done."""
        self.left(self._total - self._done - count)

    def due(self) -> bool:
        """Whether `left` would be seen."""
        return self._show and time.monotonic() >= self._next

    def left(self, count: int) -> None:
        """So many are missing."""
        new, self._done = self._total - count - self._done, self._total - count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(new)
            self._next = now + BAR
        elif self._show and now >= self._next and self._done and count:
            self._next = now + SECONDS
            seconds = count * (now - self._start) / self._done
            done = f"{self._done:,} of {self._total:,} {self._unit}s"
            print(f"  {self._what}: {done}, about {duration(seconds)} left", flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

"""Progress of work before the first step, as a bar or as lines."""

from __future__ import annotations

import time

from trainer.telemetry.readable import duration
from trainer.telemetry.tracking import bar_kind

SECONDS = 10.0  # between two lines


class Progress:
    """A bar on a terminal, else a line now and then."""

    def __init__(self, total: int, show: bool, what: str, unit: str) -> None:
        """`what` is done with `total` things, each a `unit`."""
        bar = bar_kind() if show else None
        self._bar = bar(total=total, unit=unit, desc=what, leave=False) if bar else None
        self._show, self._total, self._done = show, total, 0
        self._what, self._unit = what, unit
        self._start = self._printed = time.monotonic()

    def more(self, count: int = 1) -> None:
        """So many more are done."""
        self.left(self._total - self._done - count)

    def left(self, count: int) -> None:
        """So many are missing."""
        new, self._done = self._total - count - self._done, self._total - count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(new)
        elif self._show and now - self._printed > SECONDS and self._done:
            self._printed = now
            seconds = (now - self._start) * count / self._done
            print(
                f"  {self._what}: {self._done:,} of {self._total:,} {self._unit}s, about {duration(seconds)} left",
                flush=True,
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

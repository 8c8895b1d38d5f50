"""By which parts of a batch all ranks would take as long: from what each took for its own. No torch, no clock.

A rank's seconds are taken to grow with its images. What they have besides, as a step's launches have, is found by
measuring again under the new shares: these stay when all ranks take as long.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from trainer.telemetry.rank_watch import own_seconds

FEW, STEPS, SECONDS = 3, 8, 1.0  # measurements, steps and their seconds of a first division, at least
ROUNDS = 3  # of these at most: each begins where the one before has led
NOISE, LASTING = 1.05, 1.1  # times as fast that other shares have to be at first, and later on
WINDOW, WINDOWS = 1.0, 6  # seconds of a window; windows that later shares rest on, at least
MOST = 2 / 3  # of the windows that have to ask for them
Divide = Callable[[Sequence[float]], list[int]]  # rows of each rank, by what it computes in a second


class ShareWatch:
    """What ranks took for their rows, in windows."""

    def __init__(self, rounds: int = ROUNDS) -> None:
        """`rounds` of first divisions are left: none where shares are those of an earlier part of the run."""
        self.rounds = rounds
        self.speeds: list[float] = []  # of each rank, in images a second, that the last answer rests on
        self._restart()

    def _restart(self) -> None:
        self._steps, self._seconds = 0, 0.0
        self._measured: list[list[float]] = []  # since the last window, or of first steps
        self._windows: list[list[float]] = []

    def add(self, steps: int, ranks: Sequence[Sequence[float]]) -> None:
        """Take in so many steps; `ranks` as in `RankWatch.add`."""
        if (own := own_seconds(ranks)) is None:
            return
        self._measured.append([data + compute for data, compute in own])
        self._steps += steps
        self._seconds += steps * ranks[0][0]
        if not self.rounds and self._seconds >= WINDOW:
            self._windows.append(_typical(self._measured))
            self._steps, self._seconds, self._measured = 0, 0.0, []

    def first(self, rows: Sequence[int], divide: Divide) -> list[int] | None:
        """Other rows than the present ones, by the first steps; None where these are few, or all as fast."""
        few = len(self._measured) < FEW or self._steps < STEPS or self._seconds < SECONDS
        if not self.rounds or few:
            return None
        typical = _typical(self._measured)
        self._restart()
        wanted = self._wanted(typical, rows, divide)
        pays = gain(typical, rows, wanted) >= NOISE
        self.rounds = self.rounds - 1 if pays else 0
        return wanted if pays else None

    def lasting(self, rows: Sequence[int], divide: Divide) -> list[int] | None:
        """Other rows than the present ones, where most windows since the last answer ask for them; else None."""
        if len(self._windows) < WINDOWS:
            return None
        windows = self._windows
        self._restart()
        typical = _typical(windows)
        wanted = self._wanted(typical, rows, divide)
        asking = sum(gain(window, rows, wanted) >= LASTING for window in windows)
        return wanted if asking > MOST * len(windows) and gain(typical, rows, wanted) >= LASTING else None

    def _wanted(self, seconds: Sequence[float], rows: Sequence[int], divide: Divide) -> list[int]:
        self.speeds = [images / spent for images, spent in zip(rows, seconds, strict=True)]
        return divide(self.speeds)


def gain(seconds: Sequence[float], rows: Sequence[int], wanted: Sequence[int]) -> float:
    """How many times as fast a step would be, whose slowest rank is waited for."""
    each = (spent * after / before for spent, before, after in zip(seconds, rows, wanted, strict=True))
    return max(seconds) / max(each)


def _typical(measured: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(rank) for rank in zip(*measured, strict=True)]

"""What is looked for while a run trains: a rank that is slower than the others, and by which parts of a batch all would
take as long, from what each took for its own. No torch, no clock.

A healthy run must never be accused: each rule asks for much more than chance does. A rank's seconds are taken to grow
with its images. What they have besides, as a step's launches have, is found by measuring again under the new shares:
these stay when all ranks take as long.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WINDOW, WINDOWS = 10.0, 6  # seconds of steps, and how many of these in a row a rank has to be slow
FEW = 3  # measurements in a window, at least: where steps take seconds, it lasts longer
SLOWER = 0.1
STEPS, SECONDS = 8, 1.0  # of a first division by shares, at least, in FEW measurements
ROUNDS = 3  # of these at most: each begins where the one before has led
NOISE, LASTING = 1.05, 1.1  # times as fast that other shares have to be at first, and later on
SHARE_WINDOW = 1.0  # seconds of a window; later shares rest on WINDOWS of them, at least
MOST = 2 / 3  # of the windows that have to ask for them
Divide = Callable[[Sequence[float]], list[int]]  # rows of each rank, by what it computes in a second


@dataclass(frozen=True)
class Lag:
    """The slowest rank of a window."""

    rank: int
    behind: float  # by which share a step of its own takes longer than the median of the others'
    data: bool  # whether that is more by waiting for data than by computing
    gain: float = 1.0  # times as fast that all together would be, if none waited for another


def own_seconds(ranks: Sequence[Sequence[float]]) -> list[tuple[float, float]] | None:
    """Of each rank, what of a step it waits for data and computes without the others, as `RankWatch` takes it."""
    if any(step <= 0 or forward <= 0 for step, _, forward in ranks):
        return None
    times = max(0.0, min((step - data) / forward for step, data, forward in ranks))
    return [(data, times * forward) for _, data, forward in ranks]


class RankWatch:
    """Which rank holds up the others for a minute.

    Where ranks meet in every step, all have the same seconds a step: a slow one is seen by what it does without the
    others, which is to wait for its data, and forward passes. The backward pass, in which they meet, is taken to be as
    many times longer than the forward pass on each rank as on the one that waits for nobody.
    """

    def __init__(self) -> None:
        self.suspect: int | None = None  # who was slow in the last window
        self._named: set[int] = set()
        self._row: list[Lag] = []  # of windows in which one rank was slow, one after the other
        self._seconds = 0.0
        self._measured: list[list[tuple[float, float]]] = []

    def add(self, seconds: float, ranks: Sequence[Sequence[float]]) -> Lag | None:
        """Take in steps that took so many seconds together; the slowest rank, where they complete a window.

        Args:
            ranks: of each, the seconds of a step, those of it that it waited for data, and those of a forward pass, or
                of a part of it that is the same on all ranks.
        """
        if (own := own_seconds(ranks)) is None:
            return None
        self._seconds += seconds
        self._measured.append(own)
        if self._seconds < WINDOW or len(self._measured) < FEW:
            return None
        typical = [_typical(rank) for rank in zip(*self._measured, strict=True)]
        self._seconds, self._measured = 0.0, []
        spent = [data + compute for data, compute in typical]
        rank = max(range(len(spent)), key=spent.__getitem__)
        others = [place for place in range(len(spent)) if place != rank]
        data, compute = (typical[rank][n] - statistics.median(typical[place][n] for place in others) for n in (0, 1))
        usual = statistics.median(spent[place] for place in others)
        gain = max(spent) * statistics.fmean(1 / each for each in spent) if min(spent) > 0 else 1.0
        lag = Lag(rank, spent[rank] / usual - 1 if usual > 0 else 0.0, data > compute, gain)
        if lag.behind <= SLOWER:
            self.suspect, self._row = None, []
        else:
            self._row = [*self._row, lag] if self.suspect == rank else [lag]
            self.suspect = rank
        return lag

    def named(self) -> Lag | None:
        """A rank that was slow in all of the last windows and was not named yet, with the median of its lags."""
        if len(self._row) < WINDOWS or self.suspect is None or self.suspect in self._named:
            return None
        self._named.add(self.suspect)
        last = self._row[-WINDOWS:]
        data = sum(lag.data for lag in last) * 2 > WINDOWS
        behind, gain = (statistics.median(getattr(lag, name) for lag in last) for name in ("behind", "gain"))
        return Lag(self.suspect, behind, data, gain)


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
        if not self.rounds and self._seconds >= SHARE_WINDOW:
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

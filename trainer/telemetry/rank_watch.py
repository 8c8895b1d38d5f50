"""Detection of slow ranks, and of shares of a batch for which all ranks need the same time.

The measurements are those of each rank for its own samples. This module uses neither torch nor a
clock.

A healthy run must not get a warning, so each limit is far above what chance produces. The time of a
rank is assumed to be proportional to its number of images. A constant part, such as launches, is
corrected by the next measurement with the new shares, which are kept once all ranks need the same
time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Number of successive windows, and seconds of a window, in which a rank must be slow.
WINDOWS = 6
WINDOW = 10.0
# Minimum number of measurements in a window, which is longer if steps take seconds.
FEW = 3
# Minimum relative excess of a slow rank's time over the median of the other ranks.
MIN_LAG = 0.1
# Minimum number and seconds of the steps before a first division by shares.
MIN_STEPS = 8
MIN_SECONDS = 1.0
# Maximum number of first divisions: each starts from the result of the previous one.
ROUNDS = 3
# Minimum predicted speedup for a first division, and for a later one.
MIN_FIRST_GAIN = 1.05
LASTING = 1.1
# Seconds of a window of shares; a later division needs WINDOWS of them.
SHARE_WINDOW = 1.0
# Minimum share of the windows in which other shares are faster.
MIN_WINDOW_SHARE = 2 / 3
# Function from the images per second of each rank to the rows of each rank.
Divide = Callable[[Sequence[float]], list[int]]


@dataclass(frozen=True)
class Lag:
    """Slowest rank of a window.

    Attributes:
        rank: Number of the rank.
        behind: Relative excess of its own time for a step over the median of the other ranks.
        data: Whether waiting for data explains more of the excess than computing.
        gain: Speedup of the whole run if no rank waited for another.
    """

    rank: int
    behind: float
    data: bool
    gain: float = 1.0


def own_seconds(
    ranks: Sequence[Sequence[float]],
) -> list[tuple[float, float]] | None:
    """Return the seconds of a step that each rank waits for data and computes on its own.

    Args:
        ranks: Measurements as in `RankWatch.add`.

    Returns:
        A pair for each rank; None if a rank was not measured.
    """
    if any(step <= 0 or forward <= 0 for step, _, forward in ranks):
        return None
    ratio = min((step - data) / forward for step, data, forward in ranks)
    return [(data, max(0.0, ratio) * forward) for _, data, forward in ranks]


class RankWatch:
    """Detector of a rank that delays the other ranks for a minute.

    If ranks synchronise in every step, a step takes the same time on all ranks. A slow rank can
    only be recognised by the work before the synchronisation: waiting for data, and the forward
    pass. The backward pass, in which the ranks synchronise, is estimated: its ratio to the forward
    pass is assumed to be that of the fastest backward pass, which waits for no other rank.
    """

    def __init__(self) -> None:
        # Rank that was slow in the last window.
        self.suspect: int | None = None
        self._named: set[int] = set()
        # Lags of successive windows in which the suspect was slow.
        self._row: list[Lag] = []
        self._seconds = 0.0
        self._measured: list[list[tuple[float, float]]] = []

    def add(self, seconds: float, ranks: Sequence[Sequence[float]]) -> Lag | None:
        """Add the measurement of some steps.

        Args:
            seconds: Total duration of these steps.
            ranks: For each rank, the seconds of a step, of waiting for data in a step, and of a
                forward pass, or of a fixed part of the forward pass.

        Returns:
            The slowest rank if the steps complete a window, otherwise None.
        """
        if (own := own_seconds(ranks)) is None:
            return None
        self._seconds += seconds
        self._measured.append(own)
        if self._seconds < WINDOW or len(self._measured) < FEW:
            return None
        typical = [_compute_typical(rank) for rank in zip(*self._measured, strict=True)]
        self._seconds = 0.0
        self._measured = []
        spent = [data + compute for data, compute in typical]
        rank = max(range(len(spent)), key=spent.__getitem__)
        others = typical[:rank] + typical[rank + 1 :]
        usual_data, usual_compute = _compute_typical(others)
        usual = statistics.median(data + compute for data, compute in others)
        data, compute = typical[rank]
        behind = 0.0
        if usual > 0:
            behind = spent[rank] / usual - 1
        gain = 1.0
        if min(spent) > 0:
            gain = max(spent) * statistics.fmean(1 / time for time in spent)
        is_data = data - usual_data > compute - usual_compute
        lag = Lag(rank, behind, is_data, gain)
        if lag.behind <= MIN_LAG:
            self.suspect = None
            self._row = []
        else:
            if self.suspect != rank:
                self._row = []
            self._row = [*self._row, lag]
            self.suspect = rank
        return lag

    def named(self) -> Lag | None:
        """Return the median lag of a rank that was slow in all of the last windows.

        Each rank is returned once.
        """
        if len(self._row) < WINDOWS or self.suspect is None or self.suspect in self._named:
            return None
        self._named.add(self.suspect)
        last = self._row[-WINDOWS:]
        return Lag(
            self.suspect,
            statistics.median(lag.behind for lag in last),
            sum(lag.data for lag in last) * 2 > WINDOWS,
            statistics.median(lag.gain for lag in last),
        )


class ShareWatch:
    """Measurement of each rank's time for its samples, and choice of better numbers of samples."""

    def __init__(self, rounds: int = ROUNDS) -> None:
        """Create a watch without measurements.

        Args:
            rounds: Number of first divisions left; 0 if a resumed run has shares.
        """
        self.rounds = rounds
        # Images per second of each rank, on which the last division is based.
        self.speeds: list[float] = []
        self._restart()

    def _restart(self) -> None:
        self._steps = 0
        self._seconds = 0.0
        # Measurements since the last window, or of the first steps.
        self._measured: list[list[float]] = []
        self._windows: list[list[float]] = []

    def add(self, steps: int, ranks: Sequence[Sequence[float]]) -> None:
        """Add the measurement of `steps` steps; `ranks` is as in `RankWatch.add`."""
        if (own := own_seconds(ranks)) is None:
            return
        self._measured.append([data + compute for data, compute in own])
        self._steps += steps
        self._seconds += steps * ranks[0][0]
        if not self.rounds and self._seconds >= SHARE_WINDOW:
            self._windows.append(_compute_typical(self._measured))
            self._steps = 0
            self._seconds = 0.0
            self._measured = []

    def first(self, rows: Sequence[int], divide: Divide) -> list[int] | None:
        """Return better numbers of samples according to the first steps.

        Args:
            rows: Current number of samples of each rank.
            divide: Function that divides a batch by the speed of the ranks.

        Returns:
            The new number of samples of each rank; None if there are too few steps, or if no other
            division is faster.
        """
        is_short = (
            len(self._measured) < FEW or self._steps < MIN_STEPS or self._seconds < MIN_SECONDS
        )
        if not self.rounds or is_short:
            return None
        typical = _compute_typical(self._measured)
        self._restart()
        better = self._divide(typical, rows, divide)
        if compute_gain(typical, rows, better) < MIN_FIRST_GAIN:
            self.rounds = 0
            return None
        self.rounds -= 1
        return better

    def lasting(self, rows: Sequence[int], divide: Divide) -> list[int] | None:
        """Return better numbers of samples if they are faster in most windows, otherwise None.

        The arguments are those of `first`. The windows are those since the last division.
        """
        if len(self._windows) < WINDOWS:
            return None
        windows = self._windows
        self._restart()
        typical = _compute_typical(windows)
        better = self._divide(typical, rows, divide)
        asking = sum(compute_gain(window, rows, better) >= LASTING for window in windows)
        if (
            asking > MIN_WINDOW_SHARE * len(windows)
            and compute_gain(typical, rows, better) >= LASTING
        ):
            return better
        return None

    def _divide(
        self,
        seconds: Sequence[float],
        rows: Sequence[int],
        divide: Divide,
    ) -> list[int]:
        self.speeds = [images / spent for images, spent in zip(rows, seconds, strict=True)]
        return divide(self.speeds)


def compute_gain(
    seconds: Sequence[float],
    rows: Sequence[int],
    new_rows: Sequence[int],
) -> float:
    """Return the speedup of a step, whose time is that of its slowest rank, with new numbers.

    Args:
        seconds: Time of each rank for its current samples.
        rows: Current number of samples of each rank.
        new_rows: New number of samples of each rank.
    """
    changes = zip(seconds, rows, new_rows, strict=True)
    new_seconds = (spent * after / before for spent, before, after in changes)
    return max(seconds) / max(new_seconds)


def _compute_typical(measured: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(rank) for rank in zip(*measured, strict=True)]

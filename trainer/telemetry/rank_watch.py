"""Detection of slow ranks, and choice of batch shares with which all ranks need the same time.

Both use the times that each rank measured for its own samples. This module uses neither torch nor a
clock. In this module, a *division* says how many samples of a batch each rank gets.

A healthy run must not get a warning, so each limit is far above random variation. The time of a
rank is assumed to be proportional to its number of images. If that time has a constant part, such
as kernel launches, the next measurement corrects the shares, until all ranks need the same
time.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Number of successive windows in which a rank must be slow before a warning, and minimum seconds of
# a window.
WINDOWS = 6
WINDOW = 10.0
# Minimum number of measurements in a window, and before a division at the start of a run. So if
# steps take many seconds, a window is longer than `WINDOW`.
FEW = 3
# Minimum relative excess of a slow rank's time over the median of the other ranks.
MIN_LAG = 0.1
# Minimum number of steps, and minimum seconds, before a division at the start of a run.
MIN_STEPS = 8
MIN_SECONDS = 1.0
# Maximum number of divisions at the start of a run. Each one refines the previous one.
ROUNDS = 3
# Minimum predicted speedup for a division at the start of a run, and for a later one.
MIN_FIRST_GAIN = 1.05
LASTING = 1.1
# Minimum number of seconds of a window of `ShareWatch`. A later division needs `WINDOWS` windows.
SHARE_WINDOW = 1.0
# A later division must reach the speedup `LASTING` in more than this fraction of the windows.
MIN_WINDOW_SHARE = 2 / 3
# Function that converts the images per second of each rank to the rows of each rank.
Divide = Callable[[Sequence[float]], list[int]]


@dataclass(frozen=True)
class Lag:
    """Slowest rank of a window.

    Attributes:
        rank: Number of the rank.
        behind: Relative excess of the rank's own time per step over the median of the other ranks.
        data: Whether waiting for data explains more of the excess than computing does.
        gain: Speedup of the whole run by shares with which no rank would wait for another.
    """

    rank: int
    behind: float
    data: bool
    gain: float = 1.0


def own_seconds(
    ranks: Sequence[Sequence[float]],
) -> list[tuple[float, float]] | None:
    """Return the time per step that each rank needs without waiting for other ranks.

    Args:
        ranks: Measurements as in `RankWatch.add`.

    Returns:
        For each rank, the seconds of waiting for data and the seconds of computing; None if a rank
        was not measured.
    """
    if any(step <= 0 or forward <= 0 for step, _, forward in ranks):
        return None
    ratio = min((step - data) / forward for step, data, forward in ranks)
    return [(data, max(0.0, ratio) * forward) for _, data, forward in ranks]


class RankWatch:
    """Detector of a rank that delays the other ranks for a minute.

    If ranks synchronize in every step, a step takes the same time on all ranks. A slow rank can
    only be recognized by its work before the synchronization: waiting for data, and the forward
    pass. The backward pass, in which the ranks synchronize, is estimated: its duration relative to
    the forward pass is assumed to be that of the fastest rank, which does not wait for other ranks.
    """

    def __init__(self) -> None:
        self._named: set[int] = set()
        # Lags of the slow rank in the latest successive windows in which it was slow; empty if no
        # rank was slow in the last window.
        self._row: list[Lag] = []
        self._seconds = 0.0
        self._measured: list[list[tuple[float, float]]] = []

    def add(self, seconds: float, ranks: Sequence[Sequence[float]]) -> Lag | None:
        """Add the measurement of some steps.

        Args:
            seconds: Total duration of these steps.
            ranks: For each rank, the mean seconds of a step, of waiting for data in a step, and of
                a forward pass, or of the same part of the forward pass on all ranks.

        Returns:
            The slowest rank if the steps complete a window, otherwise None.
        """
        if (own := own_seconds(ranks)) is None:
            return None
        self._seconds += seconds
        self._measured.append(own)
        if self._seconds < WINDOW or len(self._measured) < FEW:
            return None
        typical = [*map(_compute_typical, zip(*self._measured, strict=True))]
        self._seconds = 0.0
        self._measured = []
        spent = [*map(sum, typical)]
        rank = spent.index(max(spent))
        others = typical[:rank] + typical[rank + 1 :]
        usual_data, usual_compute = _compute_typical(others)
        usual = statistics.median(map(sum, others))
        data, compute = typical[rank]
        behind = 0.0
        if usual > 0:
            behind = spent[rank] / usual - 1
        gain = 1.0
        if min(spent) > 0:
            gain = max(spent) * statistics.fmean(1 / time for time in spent)
        is_data = data - usual_data > compute - usual_compute
        lag = Lag(rank, behind, is_data, gain)
        if behind <= MIN_LAG or (self._row and self._row[-1].rank != rank):
            self._row = []
        if behind > MIN_LAG:
            self._row.append(lag)
        return lag

    def named(self) -> Lag | None:
        """Return the median lag of a rank that was slow in the last `WINDOWS` windows, if any.

        Each rank is returned only once.
        """
        if len(self._row) < WINDOWS or self._row[-1].rank in self._named:
            return None
        last = self._row[-WINDOWS:]
        rank = last[-1].rank
        self._named.add(rank)
        return Lag(
            rank,
            statistics.median(lag.behind for lag in last),
            sum(lag.data for lag in last) * 2 > WINDOWS,
            statistics.median(lag.gain for lag in last),
        )


class ShareWatch:
    """Measure each rank's time for its samples, and choose better numbers of samples."""

    def __init__(self, rounds: int = ROUNDS) -> None:
        """Create a watch without measurements.

        Args:
            rounds: Number of divisions that the start of the run may still make; 0 if a resumed run
                already has shares.
        """
        self.rounds = rounds
        # Images per second of each rank, from which the last division was computed.
        self.speeds: list[float] = []
        self._restart()

    def _restart(self) -> None:
        self._steps = 0
        self._seconds = 0.0
        # Measurements since the end of the last window, or since the restart without windows.
        self._measured: list[list[float]] = []
        # Typical seconds of each rank in each window.
        self._windows: list[list[float]] = []

    def add(self, steps: int, ranks: Sequence[Sequence[float]]) -> None:
        """Add the measurement of `steps` steps, with `ranks` as in `RankWatch.add`."""
        if (own := own_seconds(ranks)) is None:
            return
        self._measured.append([*map(sum, own)])
        self._steps += steps
        self._seconds += steps * ranks[0][0]
        if not self.rounds and self._seconds >= SHARE_WINDOW:
            self._windows.append(_compute_typical(self._measured))
            self._steps = 0
            self._seconds = 0.0
            self._measured = []

    def first(self, rows: Sequence[int], divide: Divide) -> list[int] | None:
        """Return better numbers of samples, computed from the first steps.

        Args:
            rows: Current number of samples of each rank.
            divide: Function that divides a batch by the speed of the ranks.

        Returns:
            The new number of samples of each rank. None if there are too few steps, if no round is
            left, or if the predicted speedup is less than `MIN_FIRST_GAIN`.
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
        """Return better numbers of samples, computed from windows, or None.

        The result is None if there are fewer than `WINDOWS` windows, or if too few of them predict
        the speedup `LASTING`. Windows that were compared once are not used again. The arguments are
        those of `first`.
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
    """Return the speedup of a step by new numbers of samples.

    The slowest rank determines the time of a step.

    Args:
        seconds: Time of each rank for its current samples.
        rows: Current number of samples of each rank.
        new_rows: New number of samples of each rank.
    """
    changes = zip(seconds, rows, new_rows, strict=True)
    new_seconds = (spent * after / before for spent, before, after in changes)
    return max(seconds) / max(new_seconds)


def _compute_typical(measured: Sequence[Sequence[float]]) -> list[float]:
    return [*map(statistics.median, zip(*measured, strict=True))]

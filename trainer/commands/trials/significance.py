"""Which of several things is faster, from paired repeats: pure functions on numbers, with the error under control.

Speeds compare as ratios, so everything here works on logarithms. Repeats are interleaved (A B C A B C ...), and repeat
i of one entry is paired with repeat i of the other: what slows the machine for a minute slows both. A difference is
*shown* when its confidence interval lies wholly beyond a margin that nobody would switch modes for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, stdev

from scipy.special import stdtr, stdtrit  # Student's t: its distribution and quantiles

ERROR = 0.05  # probability that a comparison shows any difference where there is none
MARGIN = 0.02  # relative; smaller differences are not shown
LOOKS = (5, 10, 15)  # repeats after which to look whether they suffice, where their number is left open
HIDDEN = 0.1  # relative; a difference that must not go unnoticed then

Runs = Mapping[int, float]  # a speed for each repeat that ended well


@dataclass(frozen=True)
class Difference:
    """What repeats say of the speed of `first` relative to `second`."""

    first: str
    second: str
    pairs: int
    ratio: float  # geometric mean of the paired ratios, without the extreme ones where the trimmed test is the clearer
    # its confidence interval at the level that this pair was held against, null for fewer than two pairs
    low: float | None
    high: float | None
    p: float  # probability of such repeats were the true ratio within the margin, for this pair alone
    verdict: str | None  # "faster" or "slower" where it is shown, else null


def differences(
    speeds: Mapping[str, Runs],
    error: float = ERROR,
    margin: float = MARGIN,
    among: Sequence[tuple[str, str]] = (),
    least: float = 0.0,
) -> list[Difference]:
    """Compare all pairs of entries, or those `among`, so that the chance of any false claim is at most `error`.

    Paired t-tests on log-ratios against the hypothesis that the ratio lies within 1 +- `margin` (a minimum-effect
    test: Murphy and Myors, J. Applied Psychology 84 (1999), p. 234; here on both sides with half of `error` each). From
    five pairs on, each is tested twice, with all of them and with the extreme fifths cut off (Tukey and McLaughlin,
    Sankhya A 25 (1963), p. 331), because another program may spoil a whole run; the clearer one counts, at twice its p.
    The step-down procedure of Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scand. J. Statistics 6
    (1979), p. 65, divides the error over the pairs, however they depend on each other.

    Args:
        least: standard deviation of the log-ratios at least, of figures so coarse that repeats may agree by chance.
    """
    tested = [(a, b, [*map(math.log, ratios(speeds[a], speeds[b]))]) for a, b in among or combinations(speeds, 2)]
    tested = [(a, b, logs) for a, b, logs in tested if logs]
    beyond = math.log1p(margin)
    clearest = [min(_estimates(logs, least), key=lambda estimate: estimate.p(beyond)) for _, _, logs in tested]
    chances = [estimate.p(beyond) for estimate in clearest]
    levels = dict(_holm(chances, error))
    pairs = []
    for number, ((first, second, logs), estimate) in enumerate(zip(tested, clearest, strict=True)):
        low, high = estimate.interval(levels[number]) if len(logs) > 1 else (None, None)
        verdict = ("faster" if estimate.centre > 0 else "slower") if chances[number] <= levels[number] else None
        ratio = math.exp(estimate.centre)
        pairs.append(Difference(first, second, len(logs), ratio, low, high, chances[number], verdict))
    return pairs


def unclear(pairs: Iterable[Difference]) -> list[Difference]:
    """Those not shown to differ that may well differ by HIDDEN: more repeats would tell."""
    reach = 1 + HIDDEN
    return [
        d for d in pairs if not d.verdict and (d.low is None or d.high is None or d.low * reach < 1 or d.high > reach)
    ]


def fastest(names: Sequence[str], pairs: Sequence[Difference]) -> list[str]:
    """Those that no other is shown to be faster than: one is the fastest, of several no difference is shown."""
    beaten = {d.second if d.verdict == "faster" else d.first for d in pairs if d.verdict}
    return [name for name in names if name not in beaten]


def ratios(runs: Runs, reference: Runs) -> list[float]:
    """Repeat by repeat, how many times as fast as the reference."""
    return [runs[repeat] / reference[repeat] for repeat in sorted(runs.keys() & reference.keys())]


@dataclass(frozen=True)
class _Estimate:
    """A centre of log-ratios with its standard error, one of `tests` that are made of them."""

    centre: float
    error: float
    freedom: int
    tests: int

    def p(self, margin: float) -> float:
        """Chance of a centre so far beyond the margin, over all the tests."""
        beyond = abs(self.centre) - margin
        if beyond <= 0 or not self.freedom:
            return 1.0
        return min(1.0, self.tests * 2 * float(stdtr(self.freedom, -beyond / self.error))) if self.error else 0.0

    def interval(self, error: float) -> tuple[float, float]:
        """The ratio's confidence interval, that all tests' hold at once with probability 1 - `error`."""
        reach = -float(stdtrit(self.freedom, error / self.tests / 2)) * self.error
        return math.exp(self.centre - reach), math.exp(self.centre + reach)


def _estimates(logs: Sequence[float], least: float) -> list[_Estimate]:
    """Of all pairs, and where there are enough of those without the least and the greatest fifth."""
    count, cut = len(logs), len(logs) // 5
    std = stdev(logs) if count > 1 else 0.0
    estimates = [_Estimate(fmean(logs), max(std, least) / math.sqrt(count), count - 1, 2 if cut else 1)]
    if cut:
        kept = sorted(logs)[cut : count - cut]
        std = stdev([*kept[:1] * cut, *kept, *kept[-1:] * cut])  # winsorised
        error = max(std, least) * math.sqrt((count - 1) / (len(kept) * (len(kept) - 1)))
        estimates.append(_Estimate(fmean(kept), error, len(kept) - 1, 2))
    return estimates


def _holm(chances: Sequence[float], error: float) -> Iterator[tuple[int, float]]:
    """(number, level) of each test: the smallest p is held against error / n, the next against error / (n - 1), ...

    From the first that fails on the level stays, so that all others fail too.
    """
    level, failed = error / max(1, len(chances)), False
    for done, number in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        if not failed:
            level = error / (len(chances) - done)
        failed = failed or chances[number] > level
        yield number, level

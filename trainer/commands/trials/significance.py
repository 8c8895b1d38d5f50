"""Decide from paired repeats which of several entries are faster, with a controlled error rate.

All functions are pure and work on numbers. Speeds are compared as ratios, so the tests use
logarithms. Repeats are interleaved (A B C A B C ...), and repeat i of one entry is paired with
repeat i of the other, because a disturbance of a minute slows down both. A difference is *shown* if
the confidence interval of the ratio lies wholly outside a margin. The margin contains differences
that are too small to matter to a user.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median, stdev
from typing import Any

# Distribution function and quantiles of Student's t.
from scipy.special import stdtr, stdtrit

# Maximum probability of claiming a difference between entries that are equally fast.
ERROR = 0.05
# Half-width of the margin: a relative difference of speeds that is too small to matter.
MARGIN = 0.02
# Numbers of repeats after which `compare` tests whether they suffice, unless the user has set the
# number of repeats. After the last number it stops in any case.
LOOKS = (5, 10, 15)
# `compare` runs more repeats while the confidence interval of a pair without a shown difference
# still includes a difference of more than this fraction.
HIDDEN = 0.1

# Speed, or another positive figure, of each finished repeat, by the number or label of the repeat.
Runs = Mapping[Any, float]


@dataclass(frozen=True)
class Difference:
    """Speed of the entry `first` relative to the entry `second`.

    Attributes:
        first: name of an entry.
        second: name of another entry.
        pairs: number of common repeats, which both entries have.
        ratio: geometric mean of the paired ratios, without the extreme ones if the trimmed test is
            the clearer one.
        low: lower end of the ratio's confidence interval, at the level that this pair was tested
            at; None for fewer than two common repeats.
        high: upper end of that interval; None for fewer than two common repeats.
        p: p-value of this pair alone: probability of a difference at least this clear if the true
            ratio were within the margin.
        verdict: "faster" or "slower" if the difference is shown, else None.
    """

    first: str
    second: str
    pairs: int
    ratio: float
    low: float | None
    high: float | None
    p: float
    verdict: str | None


def find_differences(
    speeds: Mapping[str, Runs],
    error: float = ERROR,
    margin: float = MARGIN,
    among: Sequence[tuple[str, str]] = (),
    least: float = 0.0,
) -> list[Difference]:
    """Compare pairs of entries, so that the probability of any false claim is at most `error`.

    Paired t-tests on log-ratios test the hypothesis that the ratio lies within 1 +- `margin` (a
    minimum-effect test: Murphy and Myors, J. Applied Psychology 84 (1999), p. 234; here on both
    sides with half of `error` each). With five or more common repeats, two entries are tested
    twice: on all ratios, and without the lowest and the highest fifth (Tukey and McLaughlin,
    Sankhya A 25 (1963), p. 331), because another program may spoil a whole run. The test with the
    smaller p-value counts, with twice this p-value. The step-down procedure of Holm, "A Simple
    Sequentially Rejective Multiple Test Procedure", Scand. J. Statistics 6 (1979), p. 65, divides
    `error` among the pairs. It is valid even if the tests of the pairs depend on each other.

    Args:
        speeds: speeds of each entry by its name.
        error: maximum probability of any false claim, in (0, 1).
        margin: relative difference that is too small to matter.
        among: pairs of names to compare. Empty: all pairs.
        least: lower bound of the standard deviation of the log-ratios, for metrics so coarse that
            repeats may agree by chance.

    Returns:
        One difference per pair of entries with a common repeat.
    """
    beyond = math.log1p(margin)
    tested = []
    chances = []
    for first, second in among or combinations(speeds, 2):
        logs = list(map(math.log, compute_ratios(speeds[first], speeds[second])))
        if logs:
            estimates = _estimate(logs, least)
            clearest = min(estimates, key=lambda estimate: estimate.p(beyond))
            tested.append((first, second, len(logs), clearest))
            chances.append(clearest.p(beyond))
    levels = dict(_apply_holm(chances, error))
    pairs = []
    for number, (first, second, count, estimate) in enumerate(tested):
        low = None
        high = None
        if count > 1:
            low, high = estimate.interval(levels[number])
        verdict = None
        if chances[number] <= levels[number]:
            verdict = "faster" if estimate.center > 0 else "slower"
        ratio = math.exp(estimate.center)
        pairs.append(Difference(first, second, count, ratio, low, high, chances[number], verdict))
    return pairs


def unclear(pairs: Iterable[Difference]) -> list[Difference]:
    """Return the pairs that may differ by HIDDEN although no difference is shown.

    More repeats can decide these pairs.
    """
    hidden_ratio = 1 + HIDDEN
    unclear_pairs = []
    for pair in pairs:
        if pair.verdict:
            continue
        if (
            pair.low is None
            or pair.high is None
            or pair.low * hidden_ratio < 1
            or pair.high > hidden_ratio
        ):
            unclear_pairs.append(pair)
    return unclear_pairs


def find_fastest(names: Sequence[str], pairs: Sequence[Difference]) -> list[str]:
    """Return the names of the entries for which no faster entry is shown."""
    beaten = set()
    for pair in pairs:
        if pair.verdict:
            beaten.add(pair.second if pair.verdict == "faster" else pair.first)
    return [name for name in names if name not in beaten]


def compute_ratios(runs: Runs, reference: Runs) -> list[float]:
    """Return the ratio of `runs` to `reference` for each repeat that both have."""
    common = sorted(runs.keys() & reference.keys())
    return [runs[repeat] / reference[repeat] for repeat in common]


def summarize(values: Sequence[float]) -> dict[str, Any]:
    """Return median, minimum and maximum, with the keys of proof.json and compare.json."""
    return {"median": median(values), "low": min(values), "high": max(values)}


def compute_deviation(values: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference between values and the expected values.

    The sequences are compared up to the length of the shorter one. The result is infinite if a
    value is not finite, and 0 if there is nothing to compare.
    """
    largest = 0.0
    for value, expected_value in zip(values, expected, strict=False):
        deviation = abs(value - expected_value) / max(abs(expected_value), 1e-12)
        if math.isnan(deviation):
            return math.inf
        largest = max(largest, deviation)
    return largest


@dataclass(frozen=True)
class _Estimate:
    """Center of log-ratios with its standard error.

    Attributes:
        center: mean of the log-ratios.
        error: standard error of the mean.
        freedom: degrees of freedom.
        tests: number of tests on the same log-ratios, including this one.
    """

    center: float
    error: float
    freedom: int
    tests: int

    def p(self, margin: float) -> float:
        """Return the p-value of the two-sided test that the center lies within `margin`.

        The p-value is multiplied by the number of tests, up to 1. It is 1 if the center is within
        the margin, or if there is only one ratio.
        """
        beyond = abs(self.center) - margin
        if beyond <= 0 or not self.freedom:
            return 1.0
        if self.error:
            one_sided = float(stdtr(self.freedom, -beyond / self.error))
            return min(1.0, self.tests * 2 * one_sided)
        return 0.0

    def interval(self, error: float) -> tuple[float, float]:
        """Return the confidence interval of the ratio.

        The intervals of all tests hold at the same time with probability 1 - `error`.
        """
        quantile = float(stdtrit(self.freedom, error / self.tests / 2))
        reach = -quantile * self.error
        return math.exp(self.center - reach), math.exp(self.center + reach)


def _estimate(logs: Sequence[float], least: float) -> list[_Estimate]:
    """Estimate the center from all `logs` and, for five or more, without the extreme fifths."""
    count = len(logs)
    cut = count // 5
    std = stdev(logs) if count > 1 else 0.0
    error = max(std, least) / math.sqrt(count)
    estimates = [_Estimate(fmean(logs), error, count - 1, tests=2 if cut else 1)]
    if cut:
        middle = sorted(logs)[cut : count - cut]
        # Standard error of a mean of h values that are left of n after trimming (Tukey and
        # McLaughlin): std of the winsorized n values * sqrt((n - 1) / (h (h - 1))).
        winsorized = [middle[0]] * cut + middle + [middle[-1]] * cut
        freedom = len(middle) - 1
        scale = (count - 1) / (len(middle) * freedom)
        error = max(stdev(winsorized), least) * math.sqrt(scale)
        estimates.append(_Estimate(fmean(middle), error, freedom, tests=2))
    return estimates


def _apply_holm(chances: Sequence[float], error: float) -> Iterator[tuple[int, float]]:
    """Yield (number, level) of each test, from the smallest p to the largest.

    `number` is the index of the test's p in `chances`, and `level` is what this p is compared with.
    The smallest of n values is compared with error / n, the next with error / (n - 1), and so on.
    After the first test that fails, the level stays the same, so that all later tests fail too.
    """
    level = error / max(1, len(chances))
    has_failed = False
    order = sorted(range(len(chances)), key=chances.__getitem__)
    for rank, number in enumerate(order):
        if not has_failed:
            level = error / (len(chances) - rank)
        has_failed = has_failed or chances[number] > level
        yield number, level

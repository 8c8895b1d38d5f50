"""Statements about speed: their numbers are right, and their error rate in simulated comparisons is
the stated one.
"""

import math
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import ttest_rel

from trainer.commands.trials.significance import (
    ERROR,
    LOOKS,
    compute_ratios,
    find_differences,
    unclear,
)

# standard deviation of a pair's log-ratio: runs of 4 s, medians of windows, two busy cores
NOISE = 0.027
NOISY = 0.048  # the same at other times


def test_four_pairs_are_tested_by_students_t():
    rng = np.random.default_rng(0)
    first, second = (dict(enumerate(rng.normal(100, 2, 4))) for _ in range(2))
    [differing] = find_differences({"a": first, "b": second}, margin=0.0)
    expected = ttest_rel(np.log(list(first.values())), np.log(list(second.values())))
    interval = np.exp(expected.confidence_interval(1 - ERROR))
    assert differing.p == pytest.approx(expected.pvalue)
    assert (differing.low, differing.high) == pytest.approx(tuple(interval))


def test_ratios_pair_the_repeats_that_both_have():
    assert compute_ratios(
        {
            1: 10.0,
            2: 30.0,
            4: 5.0,
        },
        {
            2: 10.0,
            1: 5.0,
            3: 1.0,
        },
    ) == [2.0, 3.0]


def speeds(*runs):
    return {
        name: dict(enumerate(values, 1)) for name, values in zip("abcdefgh", runs, strict=False)
    }


def test_a_plain_difference():
    (actual,) = find_differences(speeds([110, 111, 109, 110, 112], [100, 100, 101, 99, 100]))
    assert (
        actual.first,
        actual.second,
        actual.pairs,
        actual.verdict,
    ) == ("a", "b", 5, "faster")
    assert actual.low < actual.ratio < actual.high
    assert actual.ratio == pytest.approx(1.104, abs=1e-3)
    (turned,) = find_differences(speeds([100, 100, 101, 99, 100], [110, 111, 109, 110, 112]))
    assert turned.verdict == "slower" and turned.low == pytest.approx(1 / actual.high)


@pytest.mark.parametrize(
    "runs",
    [
        ([100], [50]),  # A single repeat says nothing about the spread.
        ([100, 120], [80, 110]),
        ([101, 102, 101, 101, 102], [100, 101, 100, 100, 101]),  # sure, and too small to matter
        ([100, 100, 100, 100, 10], [100, 100, 100, 100, 100]),  # A disturbed run.
        ([110, 112, 9], [100, 100, 100]),  # too few to tell which is the disturbed one
    ],
)
def test_no_difference_shown(runs):
    (actual,) = find_differences(speeds(*runs))
    assert actual.verdict is None


def test_holm_goes_on_after_a_clear_pair():
    """The p-value passes against 0.05 / 1 and would not pass against 0.05 / 2."""
    logs = [[0.5, 0.51, 0.49, 0.5, 0.5], [0.0] * 5, [-0.07, -0.12, -0.03, -0.09, -0.14]]
    runs = {
        name: {n: math.exp(v) for n, v in enumerate(values)}
        for name, values in zip("abc", logs, strict=True)
    }
    (alone,) = find_differences(runs, among=[("b", "c")])
    assert ERROR / 2 < alone.p < ERROR
    clear, close = find_differences(runs, among=[("a", "b"), ("b", "c")])
    assert clear.verdict == close.verdict == "faster"
    assert [d.verdict for d in find_differences(runs, among=[("b", "c"), ("c", "b")])] == [
        None,
        None,
    ]


# ------------------------------------------------------------------------------------------
# simulated comparisons


def after_looks(runs):
    """Return the statement if the number of repeats is open, like `comparing` computes it."""
    collected = []
    for look in LOOKS:
        some = {name: {repeat: row[repeat] for repeat in range(look)} for name, row in runs.items()}
        collected = find_differences(some, ERROR / len(LOOKS))
        if not unclear(collected):
            break
    return collected


def claims(
    noise,
    slower=0.0,
    entries=2,
    count=1000,
    repeats=5,
    tails=None,
    spoilt=0.0,
    seed=0,
    judge=find_differences,
):
    """Return the fraction of `count` comparisons that claim anything wrong, and that name the
    slower entry.

    `noise` is the standard deviation of a pair's log-ratio; the last entry takes 1 + slower times
    as long. With `tails` the noise is Student's with `tails` degrees of freedom; `spoilt` is the
    share of runs that something else slows by 15 % more in the mean.
    """
    random = np.random.default_rng(seed)
    shape = (count, entries, repeats)
    draws = random.standard_normal(shape) if tails is None else random.standard_t(tails, shape)
    draws *= noise / math.sqrt(2)
    draws -= random.exponential(0.15, shape) * (random.random(shape) < spoilt)
    draws[:, -1] -= math.log1p(slower)
    wrong = named = 0
    for logs in draws:
        runs = {str(number): dict(enumerate(np.exp(row))) for number, row in enumerate(logs)}
        actual = {(d.first, d.second): d.verdict for d in judge(runs)}
        last = str(entries - 1)
        true = {(a, b) for a, b in combinations(runs, 2) if slower and b == last}
        wrong += any(verdict and pair not in true for pair, verdict in actual.items())
        named += bool(true) and all(actual[pair] == "faster" for pair in true)
    return wrong / count, named / count


@pytest.mark.parametrize("noise", [0.005, NOISE, 0.05, 0.2])
@pytest.mark.parametrize("entries", [2, 6])
def test_identical_variants_show_no_difference(noise, entries, full):
    """19 of 20 is 5 % wrong; at the noise measured here it is far less."""
    wrong, _ = claims(noise, entries=entries, count=10000 if full else 1500 // entries)
    assert wrong <= (0.01 if noise <= NOISE else 0.07 if not full else 0.055)


# Two pairs are significant, the third is not.
@pytest.mark.parametrize(
    ("options", "most_wrong", "least_named"),
    [
        ({"noise": NOISE, "tails": 2}, 0.02, 0.0),  # alike, under bursts
        ({"noise": 0.007, "spoilt": 0.1}, 0.01, 0.0),
        ({"noise": NOISE, "slower": 0.1}, 0.0, 0.96),
        ({"noise": 0.007, "slower": 0.1, "spoilt": 0.05}, 0.0, 0.95),
        (
            {"noise": 0.015, "slower": 0.1, "entries": 3},
            0.02,
            0.97,
        ),
    ],
)
def test_claims_under_noise_and_with_disturbed_runs_are_rarely_wrong(
    options, most_wrong, least_named, full
):
    wrong, named = claims(**options, count=10000 if full else 700)
    assert wrong <= most_wrong and named >= least_named


@pytest.mark.parametrize("noise", [NOISE, NOISY])
def test_more_repeats_where_the_spread_is_wide(noise, full):
    """Five repeats are enough on a quiet machine."""
    options = {"count": 10000 if full else 700, "repeats": max(LOOKS), "judge": after_looks}
    wrong, named = claims(noise, slower=0.1, **options)
    assert wrong == 0 and named >= 0.98
    wrong, _ = claims(noise, **options)
    assert wrong <= 0.02

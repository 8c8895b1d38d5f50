"""Statements about trials, with their error rate under control: on numbers alone."""

from pathlib import Path

import numpy as np
import pytest

from trainer.commands.sweep.results import SPEED, Metric, TrialFigures, tabulate
from trainer.commands.trials.engine import TrialFailed, TrialOutcome

TOP1 = Metric("top1", True, "held-out images")


def worse(values, images, metric=TOP1):
    """How many trials are shown to be worse than the best; `values`: a row a trial, a column a
    seed.
    """
    trials = [TrialFigures(number, {"seed": str(number)}) for number in range(1, len(values) + 1)]
    for trial, row in zip(trials, values, strict=True):
        for seed, value in enumerate(row):
            trial.add(
                seed,
                TrialOutcome(float(value)),
                1.0,
                Path(),
                len(row),
            )
    return sum(row.compared == "worse" for row in tabulate(trials, metric, images))


@pytest.mark.slow(cases=["360-12-5", "10000-12-5"])
@pytest.mark.parametrize(("trials", "seeds"), [(2, 3), (12, 3), (12, 5), (6, 2)])
@pytest.mark.parametrize("images", [360, 10_000])
def test_trials_that_are_alike_are_rarely_said_to_differ(trials, seeds, images):
    """The best of them was chosen by the same figures; and on few images seeds agree by chance."""
    numbers = np.random.default_rng(0)
    sweeps = [numbers.binomial(images, 0.99, (trials, seeds)) / images for _ in range(150)]
    assert sum(worse(values, images) > 0 for values in sweeps) <= 0.05 * len(sweeps) + 4


def test_a_trial_with_a_failed_seed_has_no_value():
    row = TrialFigures(1, {})
    for seed, error in enumerate((None, TrialFailed("it broke", 5), None)):
        row.add(
            seed,
            TrialOutcome(None if error else 0.9, error),
            1.0,
            Path(),
            3,
        )
    assert (
        row.status,
        row.value,
        row.runs,
        row.seconds,
    ) == ("failed", None, {}, 3.0)
    assert (row.error, row.exit_code) == ("it broke", 5)


def test_large_differences_are_significant():
    numbers = np.random.default_rng(0)
    for _ in range(20):
        values = [
            numbers.normal(mean, spread, 5)
            for mean, spread in ((0.95, 0.004), (0.94, 0.004), (0.6, 0.01))
        ]
        assert 1 <= worse(values, 10_000) <= 2


def test_the_same_figures_everywhere_show_nothing():
    assert worse([[1.0] * 3, [1.0] * 3], 360) == 0
    assert worse([[0.0] * 3, [0.0] * 3], 360) == 0


def test_small_differences_of_speed_are_not_shown():
    """A difference of 1 % can be as certain as one of 10 %, but nobody would choose by it."""
    quiet = np.array([1000.0, 1000.5, 999.5, 1000.2, 999.8])
    assert (
        worse(
            [quiet, 0.99 * quiet[::-1], 0.9 * quiet[::-1]],
            0,
            Metric(SPEED, True, "images/s"),
        )
        == 1
    )
    assert worse([quiet / 2000, quiet[::-1] / 2020, quiet[::-1] / 2200], 100_000) == 2, (
        "of an accuracy it counts"
    )

"""Length of a run, its speed, and its last loss."""

import pytest

from trainer.commands.compare import comparing
from trainer.commands.compare.comparing import Length, choose_length
from trainer.commands.compare.comparison_table import spread
from trainer.commands.trials.engine import compute_speed
from trainer.recipe import load


def checked(step, samples=1437, batch=32, synthetic=False):
    data = {"train_samples": samples, "synthetic": synthetic}
    return {"data": data, "batch_size": batch, "step_time_s": {"mean": step}}


def test_a_run_is_as_long_as_its_speed_allows_or_the_user_says():
    recipe = load("digits")  # 30 epochs, 10 steps of warm-up
    # 4 s of the median.
    assert choose_length(recipe, [checked(0.02), checked(0.01), checked(9)]).steps == 10 + 200
    assert choose_length(recipe, [checked(30.0)]).steps == 10 + comparing.FEWEST
    quick = choose_length(recipe, [checked(1e-4, batch=96)])
    assert quick.steps == 10 + comparing.MOST and quick.epochs * (1437 // 96) >= quick.steps
    assert choose_length(recipe, [checked(0.01)], steps=7).steps == 17
    # The data is missing.
    assert choose_length(load("resnet50"), [checked(0.01, synthetic=True)]).steps == 20
    assert choose_length(
        load("digits", "epochs=3"), [checked(0.01, batch=100)], fixed=True
    ) == Length(42, 3, 2)


def rows(*windows):
    ends = [sum(steps for steps, _ in windows[: n + 1]) for n in range(len(windows))]
    return [
        {"step": str(end), "samples_per_sec": str(rate)}
        for end, (_, rate) in zip(ends, windows, strict=True)
    ]


def test_the_speed_of_a_run_is_the_median_of_its_windows():
    calm = [
        (10, ""),
        (10, 1000.0),
        (10, 1010.0),
        (10, 1020.0),
        (10, 990.0),
    ]
    assert compute_speed(rows(*calm, (10, 5.0)), 700.0) == 1000.0  # a burst of something else
    assert compute_speed(rows(*calm, (200, 900.0)), 700.0) == 900.0  # windows weigh their steps
    assert compute_speed(rows(*calm), 700.0) == 700.0  # too few


def test_a_mean_below_its_deviation_is_no_figure():
    assert not any(letter.isdigit() for letter in spread(151.0, 173.0))
    assert spread(1709.2, 28.44) == "1,709 +- 28" and spread(1.53, 0.046) == "1.53 +- 0.05"


def test_averaging_between_steps_counts():
    assert comparing.compute_step_fraction(
        {"seconds_in": {"steps": 6.0, "averaging": 2.0, "start-up": 2.0}}
    ) == pytest.approx(0.75)
    assert comparing.compute_step_fraction({"seconds_in": {"steps": 1.0}}) == 1.0

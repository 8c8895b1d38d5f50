"""Shares by speed: results for ranks of different speed; noise and short delays change no share."""

import random
from functools import partial

import pytest

from trainer.recipe.shares import divide_within_limits
from trainer.telemetry.rank_watch import LASTING, ROUNDS, WINDOWS, ShareWatch, compute_gain

BATCH = 64


def divide(speeds, most=BATCH):
    return divide_within_limits(BATCH, speeds, 1, [most] * len(speeds))


def ranks_of(rows, seconds, chance=None, overhead=0.0):
    """Return the figures of a window like ranks report them: all wait for the slowest, and a third
    of the time is the forward pass.
    """
    noise = [1 + (chance.uniform(-0.03, 0.03) if chance else 0.0) for _ in rows]
    own = [
        overhead + each * images * factor
        for each, images, factor in zip(seconds, rows, noise, strict=True)
    ]
    return [[max(own), 0.0, each / 3] for each in own]


def at_first(seconds, rows, **more):
    """Return the local batch sizes after the first steps."""
    watch = ShareWatch()
    for _ in range(60):
        watch.add(4, ranks_of(rows, seconds, **more))
        rows = watch.first(rows, divide) or rows
    return rows


@pytest.mark.parametrize(
    ("seconds", "rows"),
    [
        ((0.01, 0.03), [48, 16]),
        ((0.02, 0.01), [21, 43]),
        ((0.01, 0.01), [32, 32]),
        ((0.01, 0.02, 0.04), [37, 18, 9]),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_first_steps_divide_by_speed(seconds, rows, seed):
    equal = divide([1] * len(seconds))
    actual = at_first(seconds, equal, chance=random.Random(seed))
    assert sum(actual) == BATCH
    assert all(abs(a - b) <= 2 for a, b in zip(actual, rows, strict=True))
    if len({*seconds}) == 1:
        assert actual == equal, "noise is no difference"


def test_costs_that_do_not_grow_with_images_are_handled_by_measuring_again():
    """An image costs 0.1 + 0.01 n and 0.1 + 0.03 n seconds: equal at 44 and 20 images, but not at
    those of one measurement.
    """
    rows = at_first((0.01, 0.03), [32, 32], overhead=0.1)
    assert max(abs(rows[0] - 46), abs(rows[1] - 18)) <= 2
    spent = [0.1 + 0.01 * rows[0], 0.1 + 0.03 * rows[1]]
    assert max(spent) / min(spent) < 1.1


def test_few_steps_divide_nothing():
    watch = ShareWatch()
    for steps in (1, 1, 1, 1):
        watch.add(steps, ranks_of([32, 32], (0.01, 0.03)))
        assert watch.first([32, 32], divide) is None


def later(windows, rows=(32, 32), most=BATCH):
    """Return the shares at the start of an epoch after these windows' seconds per image on each
    rank.
    """
    watch = ShareWatch(0)
    for seconds in windows:
        watch.add(4, ranks_of(rows, seconds))
        assert watch.first(rows, divide) is None
    return watch.lasting(list(rows), partial(divide, most=most))


SAME = (0.01, 0.01)
SLOW = (0.01, 0.02)


def test_a_lasting_change_is_followed():
    assert later([SLOW] * 3 * WINDOWS) == [43, 21]
    assert later([SAME] * WINDOWS + [SLOW] * 3 * WINDOWS) == [43, 21]
    assert later([SLOW] * 3 * WINDOWS, most=40) == [40, 24], "as far as the first has room"


@pytest.mark.parametrize("place", range(3 * WINDOWS))
def test_a_passing_one_is_not(place):
    windows = [SAME] * 3 * WINDOWS
    windows[place] = (0.01, 1.0)
    assert later(windows) is None
    assert later([SAME] * WINDOWS + [SLOW] * WINDOWS) is None, "half of the epoch"
    assert later([SLOW] * (WINDOWS - 4)) is None, "an epoch of few windows waits for the next one"
    assert later([(0.01, 0.0105)] * 3 * WINDOWS) is None, "less than what is worth it"


def test_gain_is_by_the_slowest():
    assert compute_gain([1.0, 2.0], [32, 32], [43, 21]) == pytest.approx(2 / (43 / 32))
    assert compute_gain([1.0, 1.0], [32, 32], [32, 32]) == 1 < LASTING
    assert ROUNDS > 1

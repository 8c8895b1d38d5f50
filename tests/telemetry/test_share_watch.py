"""Shares by speed: what is found of ranks that differ, and that neither noise nor a passing slowness changes any."""

import random
from functools import partial

import pytest

from trainer.recipe.shares import bounded
from trainer.telemetry.rank_watch import LASTING, ROUNDS, WINDOWS, ShareWatch, gain

BATCH = 64


def divide(speeds, most=BATCH):
    return bounded(BATCH, speeds, 1, [most] * len(speeds))


def ranks_of(rows, seconds, chance=None, overhead=0.0):
    """A window's figures, as ranks tell them: the slowest is waited for, and a third is the forward pass."""
    noise = [1 + (chance.uniform(-0.03, 0.03) if chance else 0.0) for _ in rows]
    own = [overhead + each * images * factor for each, images, factor in zip(seconds, rows, noise, strict=True)]
    return [[max(own), 0.0, each / 3] for each in own]


def at_first(seconds, rows, **more):
    """The rows that the first steps lead to."""
    watch = ShareWatch()
    for _ in range(60):
        watch.add(4, ranks_of(rows, seconds, **more))
        rows = watch.first(rows, divide) or rows
    return rows


@pytest.mark.parametrize(
    ("seconds", "rows"),
    [((0.01, 0.03), [48, 16]), ((0.02, 0.01), [21, 43]), ((0.01, 0.01), [32, 32]), ((0.01, 0.02, 0.04), [37, 18, 9])],
)
@pytest.mark.parametrize("seed", range(5))
def test_first_steps_divide_by_speed(seconds, rows, seed):
    equal = divide([1] * len(seconds))
    found = at_first(seconds, equal, chance=random.Random(seed))
    assert sum(found) == BATCH and all(abs(a - b) <= 2 for a, b in zip(found, rows, strict=True))
    if len({*seconds}) == 1:
        assert found == equal, "noise is no difference"


def test_what_does_not_grow_with_images_is_met_by_measuring_again():
    """Seconds of 0.1 + 0.01 n and 0.1 + 0.03 n: as long at 44 and 20 images, not at those of one measurement."""
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
    """What an epoch's start says after these windows' seconds of an image on each rank."""
    watch = ShareWatch(0)
    for seconds in windows:
        watch.add(4, ranks_of(rows, seconds))
        assert watch.first(rows, divide) is None
    return watch.lasting(list(rows), partial(divide, most=most))


SAME, SLOW = (0.01, 0.01), (0.01, 0.02)


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
    assert gain([1.0, 2.0], [32, 32], [43, 21]) == pytest.approx(2 / (43 / 32))
    assert gain([1.0, 1.0], [32, 32], [32, 32]) == 1 < LASTING and ROUNDS > 1

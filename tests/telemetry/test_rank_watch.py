"""A slow rank is reported.

A week of healthy minutes, built from real ones, causes no report.

`rank_times.json` has, by the number of ranks, steps of resnet8 in mode=ddp on a CPU, and of each
rank its microseconds of the step, those for its data, and those of its forward pass: of a
processor, as if each rank had a core to itself.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from trainer.telemetry.rank_watch import WINDOW, WINDOWS, RankWatch

TRACES = json.loads((Path(__file__).parent / "rank_times.json").read_text())
WEEK = 7 * 24 * 3600  # seconds
BLOCK = 30  # steps of a trace that stay together


def named(ranks, seconds, seed=1, slow=(1.0, 0.0), rank=0):
    """Return the ranks that are reported and when, for steps of one second each that are drawn from
    a healthy run in blocks.

    `slow` is a factor of one rank's forward pass, and its data wait as a share of a step.
    """
    rows = TRACES[ranks]
    chance = random.Random(seed)
    watch = RankWatch()
    collected = []
    for second in range(seconds):
        if second % BLOCK == 0:
            place = chance.randrange(len(rows))
        own = [
            [step, data, forward]
            for step, data, forward in rows[(place + second % BLOCK) % len(rows)]
        ]
        late = own[rank][0] * slow[1]
        own[rank] = [
            own[rank][0] * slow[0] + late,
            own[rank][1] + late,
            own[rank][2] * slow[0],
        ]
        slowest = max(step for step, _, _ in own)  # the others wait for it
        watch.add(1.0, [(slowest, data, forward) for _, data, forward in own])
        if (lag := watch.named()) is not None:
            collected.append((second, lag))
    return collected


@pytest.mark.slow(cases=["4"])
@pytest.mark.parametrize("ranks", TRACES)
def test_a_week_of_healthy_minutes_names_nobody(ranks, full):
    assert named(ranks, WEEK if full else WEEK // 14) == []


@pytest.mark.parametrize("slow", [(1.12, 0.0), (1.0, 0.12)])
@pytest.mark.parametrize("ranks", TRACES)
def test_a_rank_that_is_an_eighth_slower_is_named_with_its_cause(ranks, slow):
    for rank in range(int(ranks)):
        (second, lag), *more = named(ranks, 3 * 3600, 2, slow, rank)
        assert not more and lag.rank == rank and lag.data == (slow[1] > 0), (rank, lag)
        assert 0.1 < lag.behind < 0.3 and second + 1 >= WINDOW * WINDOWS
    assert named(ranks, 3600, 2, (1.03, 0.0)) == [], "3 % are not worth a word"


def test_where_a_rank_was_not_measured_none_is_judged():
    watch = RankWatch()
    assert [
        watch.add(100.0, [(1.0, 0.0, 0.2), (1.0, 0.0, forward)]) for forward in (0.0, 0.1, 0.1)
    ] == [None] * 3
    lag = watch.add(
        1.0,
        [(1.0, 0.0, 0.2), (1.0, 0.0, 0.1)],
    )
    assert lag is not None
    assert (lag.rank, lag.behind) == (0, pytest.approx(1.0))

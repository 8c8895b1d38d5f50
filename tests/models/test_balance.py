"""Cuts that make the slowest stage fastest, as tables and against brute force, and timings that
leave no trace.
"""

import random
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from trainer.errors import RecipeError
from trainer.models.balance import BlockCost, balance, time_blocks
from trainer.models.partition import trace


def blocks(times: str, crossing: str = "") -> list[BlockCost]:
    """Return a block for each digit: seconds of forward and backward, a third of them forward, and
    the bytes after it.
    """
    sizes = [int(size) for size in crossing] or [1] * len(times)
    return [
        BlockCost(int(time) / 3, int(time) * 2 / 3, size)
        for time, size in zip(times, sizes, strict=True)
    ]


@pytest.mark.parametrize(
    ("times", "crossing", "stages", "drawn"),
    [
        ("1111", "", 1, "1111"),
        ("1111", "", 2, "11|11"),
        ("1111", "", 4, "1|1|1|1"),
        ("9111", "", 2, "9|111"),
        ("1119", "", 2, "111|9"),
        ("123456789", "", 3, "12345|67|89"),  # Skiena's example
        ("11111", "92110", 2, "111|11"),  # 2|3 and 3|2 are equally fast: fewer bytes cross
        ("11111", "91210", 2, "11|111"),
        ("5115", "1910", 2, "51|15"),  # the fastest, however many bytes
        ("0000", "3120", 2, "00|00"),
    ],
)
def test_cuts(times, crossing, stages, drawn):
    cuts = balance(blocks(times, crossing), stages)
    assert "".join(time + "|" * (i in cuts) for i, time in enumerate(times)) == drawn


@pytest.mark.parametrize("seed", range(30))
def test_the_balance_equals_brute_force(seed, full):
    draw = random.Random(seed)
    for _ in range(30 if full else 3):
        count = draw.randint(1, 9)
        costs = [
            BlockCost(
                draw.random(),
                draw.choice([0, draw.random()]),
                draw.randint(0, 9),
            )
            for _ in range(count)
        ]
        stages = draw.randint(1, count)

        def slowest(cuts, costs=costs, count=count):
            ends = [0, *(cut + 1 for cut in cuts), count]
            return max(sum(c.forward + c.backward for c in costs[a:b]) for a, b in pairwise(ends))

        ways = list(combinations(range(count - 1), stages - 1))
        limit = min(map(slowest, ways)) * 1.01 + 1e-12
        best = min(sum(costs[i].bytes for i in way) for way in ways if slowest(way) <= limit)
        cuts = balance(costs, stages)
        assert cuts in ways and slowest(cuts) <= limit
        assert sum(costs[i].bytes for i in cuts) == best


def test_too_many_stages():
    with pytest.raises(RecipeError, match=r"\b3 stages .*\b2 cuts .*\b1\b"):
        balance(blocks("11"), 3)


def model() -> nn.Module:
    seen = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
    return nn.Sequential(
        *seen,
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(64, 2),
    )


def test_costs_of_each_block():
    traced = trace(model())
    assert traced.cuts == ("0", "4")
    costs = time_blocks(traced, torch.randn(5, 3, 4, 4))
    assert [cost.bytes for cost in costs] == [5 * 4 * 16 * 4, 5 * 64 * 4, 0]
    assert all(cost.forward > 0 and cost.backward > 0 for cost in costs)


def test_the_median_of_the_repeats_after_one_to_warm_up(monkeypatch):
    class Clock:
        """A clock that advances by the given seconds between two readings; a round reads it three
        times for each of three blocks.
        """

        now = 0
        readings = 0

        def __call__(self, device):
            self.now += (100, 3, 1, 2)[self.readings // 9]
            self.readings += 1
            return self.now

    monkeypatch.setattr("trainer.models.balance._clock", Clock())
    costs = time_blocks(
        trace(model()),
        torch.randn(2, 3, 4, 4),
        repeats=3,
    )
    assert [(cost.forward, cost.backward) for cost in costs] == [(2, 2)] * 3


@pytest.mark.parametrize("training", [True, False])
def test_timing_leaves_no_trace(training):
    measured = model().train(training)
    measured[1].eval()
    measured[5].weight.requires_grad_(False)
    measured[0].weight.grad = torch.ones_like(measured[0].weight)
    before = {name: tensor.clone() for name, tensor in measured.state_dict().items()}
    flags = [m.training for m in measured.modules()]
    inputs = torch.randn(2, 3, 4, 4)
    state = torch.get_rng_state()
    with torch.no_grad():
        time_blocks(trace(measured), inputs)
    assert not inputs.requires_grad
    torch.testing.assert_close(measured.state_dict(), before, rtol=0, atol=0)
    assert [m.training for m in measured.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(measured[0].weight.grad, torch.ones_like(measured[0].weight))
    assert all(p.grad is None for name, p in measured.named_parameters() if name != "0.weight")
    assert [name for name, p in measured.named_parameters() if not p.requires_grad] == ["5.weight"]

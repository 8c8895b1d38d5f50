"""How far two runs are apart: what must not pass does not."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from trainer.commands.prove.right import ROUNDED, TOLERANCE
from trainer.commands.prove.traces import STEPS, Traces, compared, differences, different_bits


def run(**changes):
    generator = torch.Generator().manual_seed(0)

    def tensors():
        return {name: torch.randn(8, generator=generator) for name in ("a", "b")}

    plain = Traces([2.0 - 0.01 * n for n in range(STEPS)], [1.0] * STEPS, tensors(), tensors())
    return dataclasses.replace(plain, **changes)


def with_one(tensors, name, value):
    return {**tensors, name: value}


FAULTS = {
    "a loss of one step": lambda one: {"losses": [*one.losses[:-1], one.losses[-1] * 1.01]},
    "a step too few": lambda one: {"losses": one.losses[:-1]},
    "no losses": lambda one: {"losses": []},
    "a loss that is no number": lambda one: {"losses": [math.nan] * STEPS},
    "a norm": lambda one: {"norms": [*one.norms[:-1], 1.1]},
    "no norms": lambda one: {"norms": []},
    "a weight": lambda one: {"weights": with_one(one.weights, "a", one.weights["a"] * 1.02)},
    "a weight that is no number": lambda one: {"weights": with_one(one.weights, "a", one.weights["a"] * math.nan)},
    "a weight's shape": lambda one: {"weights": with_one(one.weights, "a", one.weights["a"][:7])},
    "a weight that is missing": lambda one: {"weights": {"b": one.weights["b"]}},
    "a weight more": lambda one: {"weights": with_one(one.weights, "c", torch.ones(1))},
    "no optimizer's state": lambda one: {"optimizer": {}},
    "half of a momentum": lambda one: {"optimizer": with_one(one.optimizer, "b", one.optimizer["b"] / 2)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_beyond_the_bounds(fault):
    one = run()
    other = dataclasses.replace(one, **FAULTS[fault](one))
    for kind in TOLERANCE:
        found = compared(other, one, TOLERANCE[kind], "mend it")
        assert found.status == "wrong" and found.todo == "mend it" and found.line.startswith("differs: "), found
    assert different_bits(other, one)


def test_rounding_alone_is_right_and_tells_how_much():
    one = run()
    other = dataclasses.replace(one, optimizer={name: t * (1 + 1e-6) for name, t in one.optimizer.items()})
    found = compared(other, one, TOLERANCE["cpu"], "mend it")
    assert found.status == "right" and "optimizer 1e-06" in found.line and "losses 0" in found.line
    assert found.figures["deviations"]["optimizer"] == pytest.approx(1e-6, rel=0.2)
    assert different_bits(other, one) == ["optimizer"]


def test_the_same_is_told_as_that():
    assert "last bit" in compared(run(), run(), TOLERANCE["cpu"], "").line
    assert different_bits(run(), run()) == [] and not any(differences(run(), run()).values())


def test_bit_equality_needs_all_steps():
    one = run(losses=[1.0] * 3)
    assert different_bits(one, one) == ["steps"], "two runs that ended early prove nothing"


def test_two_runs_without_anything_are_not_equal():
    nothing = Traces([], [], {}, {})
    assert compared(nothing, nothing, TOLERANCE["cuda"], "").status == "wrong" and different_bits(nothing, nothing)


def test_a_small_tensor_may_differ_by_what_is_nothing_beside_the_others():
    """A bias whose gradient is nought but for rounding has no direction of its own."""
    big = {"a": torch.ones(1000), "b": torch.full((1,), 1e-9)}
    one, other = run(optimizer=big), run(optimizer=with_one(big, "b", -big["b"]))
    assert compared(other, one, TOLERANCE["cpu"], "").status == "right"


def test_bounds_grow_with_rounding():
    for what in TOLERANCE["cpu"]:
        bounds = [TOLERANCE["cpu"][what], ROUNDED["fp16"][what], ROUNDED["bf16"][what]]
        assert bounds == sorted(bounds) and bounds[-1] < 0.2, what

"""What twenty steps leave, and how far two runs are apart: losses, gradients' norms, optimizer state, weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.commands.compare.running import Failed, steps_of
from trainer.commands.prove.outcome import Outcome, right, wrong

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 20


@dataclass(frozen=True)
class Traces:
    """Of a run: losses and gradients' norms step by step, and its weights and optimizer's state at the end."""

    losses: list[float]
    norms: list[float]
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


def traces(path: Path) -> Traces:
    from trainer.saving import checkpoint
    from trainer.telemetry.curves import curves_of

    found = checkpoint.newest(path, lambda line: None)
    if found is None:
        raise Failed("the run left no checkpoint", 1)
    kept = {stem: dict(found.state.tensors.get(stem, {}).items()) for stem in ("model", "optimizer")}
    norms = curves_of(path).get("train/grad_norm", ([], [], []))[2]
    return Traces([float(row["train_loss"]) for row in steps_of(path)], norms, kept["model"], kept["optimizer"])


def deviations(found: Traces, expected: Traces) -> dict[str, float]:
    """The largest relative differences; infinite where one has what the other lacks."""
    return {
        "losses": _of_numbers(found.losses, expected.losses),
        "norms": _of_numbers(found.norms, expected.norms),
        "optimizer": _of_tensors(found.optimizer, expected.optimizer),
        "weights": _of_tensors(found.weights, expected.weights),
    }


def _of_numbers(found: Sequence[float], expected: Sequence[float]) -> float:
    if len(found) != len(expected) or len(expected) < STEPS:
        return math.inf
    apart = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, expected, strict=True)]
    return max(apart) if all(map(math.isfinite, apart)) else math.inf


def _of_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest distance of a tensor as a share of its own length, or of a thousandth of all of them together."""
    if found.keys() != expected.keys() or not expected:
        return math.inf
    if any(found[name].shape != tensor.shape for name, tensor in expected.items()):
        return math.inf
    least = 1e-3 * math.sqrt(sum(float(tensor.double().square().sum()) for tensor in expected.values())) or 1e-12
    apart = [
        float((found[name].double() - tensor.double()).norm()) / (float(tensor.double().norm()) + least)
        for name, tensor in expected.items()
    ]
    return max(apart) if all(map(math.isfinite, apart)) else math.inf


def held(found: Traces, expected: Traces, bounds: Mapping[str, float], todo: str) -> Outcome:
    """Two runs' traces against bounds."""
    apart = deviations(found, expected)
    told = {name: value if math.isfinite(value) else None for name, value in apart.items()}
    beyond = [name for name, value in apart.items() if not value <= bounds[name]]
    if beyond:
        listed = ", ".join(f"{name} by {apart[name]:.2g} (at most {bounds[name]:g})" for name in beyond)
        return wrong(f"differs: {listed}", todo, deviations=told, bounds=dict(bounds))
    if not any(apart.values()):
        return right("the same to the last bit", deviations=told, bounds=dict(bounds))
    line = ", ".join(f"{name} {value:.0e}" if value else f"{name} 0" for name, value in apart.items())
    return right(f"relative differences: {line}", deviations=told, bounds=dict(bounds))


def same_bits(found: Traces, expected: Traces) -> list[str]:
    """Which of the traces are not the same to the last bit."""
    import torch

    different = [name for name in ("losses", "norms") if getattr(found, name) != getattr(expected, name)]
    for name in ("weights", "optimizer"):
        one, two = getattr(found, name), getattr(expected, name)
        if one.keys() != two.keys() or not all(torch.equal(one[key], two[key]) for key in two):
            different.append(name)
    return different + ["steps"] * (len(expected.losses) != STEPS)

"""What twenty steps leave, and how far two runs are apart: losses, gradients' norms, optimizer state, weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.commands.prove.check_runner import Outcome, right, wrong
from trainer.commands.trials.engine import TrialFailed, steps_of

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
    from trainer.telemetry.events import curves_of

    newest = checkpoint.newest(path, lambda line: None)
    if newest is None:
        raise TrialFailed("the run left no checkpoint", 1)
    weights, optimizer = (
        {name: tensor.read() for name, tensor in newest.state.part(part).items()} for part in ("model", "optimizer")
    )
    norms = curves_of(path).get("train/grad_norm", ([], [], []))[2]
    return Traces([float(row["train_loss"]) for row in steps_of(path)], norms, weights, optimizer)


def differences(actual: Traces, expected: Traces) -> dict[str, float]:
    """The largest relative differences; infinite where one has what the other lacks."""
    return {
        "losses": _of_numbers(actual.losses, expected.losses),
        "norms": _of_numbers(actual.norms, expected.norms),
        "optimizer": _of_tensors(actual.optimizer, expected.optimizer),
        "weights": _of_tensors(actual.weights, expected.weights),
    }


def _largest(values: Sequence[float]) -> float:
    return max(values) if all(map(math.isfinite, values)) else math.inf


def _of_numbers(actual: Sequence[float], expected: Sequence[float]) -> float:
    if len(actual) != len(expected) or len(expected) < STEPS:
        return math.inf
    return _largest([abs(a - b) / max(abs(b), 1e-12) for a, b in zip(actual, expected, strict=True)])


def _of_tensors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest distance of a tensor relative to its own norm, or to a thousandth of that of all together."""
    if not expected or {name: t.shape for name, t in actual.items()} != {name: t.shape for name, t in expected.items()}:
        return math.inf
    norms = {name: float(tensor.double().norm()) for name, tensor in expected.items()}
    least = 1e-3 * math.hypot(*norms.values()) or 1e-12
    return _largest([float((actual[n].double() - t.double()).norm()) / (norms[n] + least) for n, t in expected.items()])


def compared(actual: Traces, expected: Traces, bounds: Mapping[str, float], todo: str) -> Outcome:
    """Whether two runs' traces are within bounds of each other."""
    apart = differences(actual, expected)
    figures = {
        "deviations": {name: value if math.isfinite(value) else None for name, value in apart.items()},
        "bounds": dict(bounds),
    }
    if beyond := [name for name, value in apart.items() if not value <= bounds[name]]:
        parts = ", ".join(f"{name} by {apart[name]:.2g} (at most {bounds[name]:g})" for name in beyond)
        return wrong(f"differs: {parts}", todo, **figures)
    if not any(apart.values()):
        return right("the same to the last bit", **figures)
    line = ", ".join(f"{name} {value:.0e}" if value else f"{name} 0" for name, value in apart.items())
    return right(f"relative differences: {line}", **figures)


def different_bits(actual: Traces, expected: Traces) -> list[str]:
    """Which of the traces are not the same to the last bit."""
    import torch

    different = [name for name in ("losses", "norms") if getattr(actual, name) != getattr(expected, name)]
    for name in ("weights", "optimizer"):
        a, b = getattr(actual, name), getattr(expected, name)
        if a.keys() != b.keys() or not all(torch.equal(a[key], b[key]) for key in b):
            different.append(name)
    return different + ["steps"] * (len(expected.losses) != STEPS)

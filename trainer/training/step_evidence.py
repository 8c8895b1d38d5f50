"""Proof that a replayed step is the launched one: the same step done again, from where it began, on what it was given.

The last launched step before a recording leaves its evidence: what it began with, its micro-batches, its gradients.
Replayed, it has to leave the weights, buffers, optimizer's state, losses and random numbers that it left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.data import Batch
from trainer.models.equivalence import NOISE, TOLERANCE, distance
from trainer.models.host_state import held_tensors
from trainer.modes.base import Strategy
from trainer.optim.optimization import Updater

ULP = 2.0**-22  # of a weight's norm: what rounding may hide of its change


def live_state(strategy: Strategy, updater: Updater) -> dict[str, Tensor]:
    """All that a step reads and changes beside gradients and its own memory, by names for messages."""
    found: dict[str, Tensor] = {f"weight {name}": p.data for name, p in strategy.named_parameters().items()}
    found |= held_tensors(strategy.modules())
    for number, values in enumerate(updater.optimizer.state.values()):
        found |= {f"optimizer's {key} ({number})": v for key, v in values.items() if isinstance(v, Tensor)}
    return found | {f"flag {name}": flag for name, flag in {"bad": updater.bad, **updater.state()}.items()}


def random_states(devices: Sequence[torch.device]) -> list[Tensor]:
    """Of the devices' generators alone: the host's are as they were. Nothing waits."""
    return [torch.cuda.get_rng_state(d) if d.type == "cuda" else torch.get_rng_state() for d in dict.fromkeys(devices)]


def set_random_states(devices: Sequence[torch.device], states: Sequence[Tensor]) -> None:
    for device, state in zip(dict.fromkeys(devices), states, strict=True):
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)


@dataclass
class LaunchedPass:
    """A micro-batch's pass as it was launched."""

    batch: Batch
    weight: float
    sync: bool
    random: tuple[list[Tensor], list[Tensor]]  # the devices' generators, before it and after
    loss: Tensor


@dataclass
class Evidence:
    """Of one launched step."""

    lr: float
    before: dict[str, Tensor]  # copies of the live state
    passes: list[LaunchedPass] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)  # copies, of this rank's passes alone
    reduced: list[Tensor | None] = field(default_factory=list)  # copies, as the optimizer found them
    after: dict[str, Tensor] = field(default_factory=dict)  # copies, from before anything else changes it: an averaging
    usual: bool = False  # whether its micro-batches have the shapes of the step before

    def is_finite(self) -> bool:
        """Whether it proves anything: of a step that is skipped, as fp16's first ones are, nothing stays."""
        tensors = [*(launched.loss for launched in self.passes), *(g for g in self.reduced if g is not None)]
        return all(bool(norm.isfinite()) for norm in torch._foreach_norm(tensors))  # perhaps of several devices


def shape_of(batch: Batch) -> tuple[object, ...]:
    """What a recording is for."""
    return tuple((part.shape, part.stride(), part.dtype) for part in (batch.inputs, batch.targets))


def copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.detach().clone() for tensor in tensors]


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def fill(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            targets[name].copy_(value)


class StepResult(NamedTuple):
    """What one replay of the step left."""

    losses: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    state: Mapping[str, Tensor]

    def against(self, other: StepResult, before: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
        """How far each tensor is from another trial's, as a share of its norm: of weights' changes."""
        largest = max([float(g.norm()) for g in self.gradients if g is not None], default=0.0)
        for number, pair in enumerate(zip(self.losses, other.losses, strict=True), 1):
            yield f"loss of pass {number}", distance(*pair)
        for number, (one, two) in enumerate(zip(self.gradients, other.gradients, strict=True)):
            if one is None or two is None:
                yield f"gradient {number}", 0.0 if one is two else float("inf")
            else:  # one that should be zero is rounding errors
                yield f"gradient {number}", distance(one, two, floor=1e-3 * largest)
        for name, one in self.state.items():
            start = before[name]
            if name.startswith("weight "):
                floor = ULP / TOLERANCE["fp32"] * float(start.norm())
                yield name, distance(one - start, other.state[name] - start, floor)
            else:
                yield name, distance(one, other.state[name])


def difference(
    evidence: Evidence, live: Mapping[str, Tensor], precision: str, replay: Callable[[], StepResult]
) -> str | None:
    """What a replay does otherwise than the launched step; None where it is the same.

    Args:
        live: the state, which is as it was again afterwards.
        replay: does the step of the evidence by replays, from the live state on.
    """
    if not live.keys() == evidence.before.keys() == evidence.after.keys():
        return "state of the model or optimizer comes or goes"
    now = copied(live)
    losses = [launched.loss for launched in evidence.passes]
    launched = StepResult(losses, evidence.gradients, evidence.after)
    try:
        fill(live, evidence.before)
        found = replay()
        far = {name: apart for name, apart in launched.against(found, evidence.before) if apart > TOLERANCE[precision]}
        if not far:
            return None
        kept = StepResult(found.losses, copies(found.gradients), copied(found.state))
        fill(live, evidence.before)
        noise = dict(kept.against(replay(), evidence.before))
        worst = next((name for name, apart in far.items() if not apart <= NOISE * noise[name]), None)
        return None if worst is None else f"{worst} is {far[worst]:.2g} of its norm apart"
    finally:
        fill(live, now)

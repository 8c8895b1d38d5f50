"""Proof that a CUDA graph replay computes the same step as eager execution.

The last eager step before a capture leaves its evidence: the state before it, its micro-batches and
gradients, and the state after it. A replay from the same state must lead to the same losses,
gradients, weights, buffers and optimizer state, up to rounding, and to the same states of the
random generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.data import Batch
from trainer.models.equivalence import NOISE, TOLERANCE, relative_error
from trainer.models.host_state import list_held_tensors
from trainer.modes.state import ModelState
from trainer.optim.optimization import Updater
from trainer.optim.optimizers import name_optimizer_state
from trainer.training.replaying_ranks import ReplayingRanks

# When the changes of a weight in two computations of a step are compared, a difference up to this
# fraction of the weight's norm is always tolerated, because rounding of the weight can cause it.
ULP = 2.0**-22


def collect_live_state(model_state: ModelState, updater: Updater) -> dict[str, Tensor]:
    """Return all tensors that a step reads and changes, under the names that messages use.

    Gradients, and tensors that exist only within the step, are left out.
    """
    parameters = model_state.named_parameters()
    state = {f"weight {name}": parameter.data for name, parameter in parameters.items()}
    state |= list_held_tensors(model_state.modules())
    state |= name_optimizer_state(updater.optimizer, parameters)
    state["flag bad"] = updater.bad
    return state | {f"flag {name}": flag for name, flag in updater.state().items()}


@dataclass
class EagerPass:
    """The eager forward and backward pass of one micro-batch.

    Attributes:
        batch: The micro-batch.
        weight: Factor of each sample's loss: 1 / number of images of a step.
        sync: Whether the ranks exchange gradients in this pass.
        random: States of the devices' generators before and after the pass.
        loss: Loss of the micro-batch, 0-dim.
    """

    batch: Batch
    weight: float
    sync: bool
    random: tuple[list[Tensor], list[Tensor]]
    loss: Tensor


@dataclass
class Evidence:
    """The evidence of one eager step. All tensors are copies.

    Attributes:
        lr: Learning rate.
        before: State before the step.
        passes: The forward and backward passes of the micro-batches, in order.
        gradients: Gradients as the optimizer reads them.
        after: State after the update, before anything else, such as an averaging, changes it.
        usual: Whether the micro-batches have the same shapes as those of the previous step.
    """

    lr: float
    before: dict[str, Tensor]
    passes: list[EagerPass] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    after: dict[str, Tensor] = field(default_factory=dict)
    usual: bool = False

    def is_finite(self) -> bool:
        """Return whether all losses and gradients are finite.

        The update of a step that is not finite is skipped, as in the first steps in fp16. Then
        there is no change to compare.
        """
        tensors = [eager.loss for eager in self.passes]
        tensors += [gradient for gradient in self.gradients if gradient is not None]
        # The tensors may be on several devices, so their norms cannot be stacked.
        return all(bool(norm.isfinite()) for norm in torch._foreach_norm(tensors))


def shape_of(batch: Batch) -> tuple[object, ...]:
    """Return shapes, strides and types of a batch.

    A captured pass can only be replayed on batches for which all of these are equal.
    """
    return tuple((part.shape, part.stride(), part.dtype) for part in (batch.inputs, batch.targets))


def copy_list(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.detach().clone() for tensor in tensors]


def copy_named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def copy_into(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            targets[name].copy_(value)


class StepResult(NamedTuple):
    """Result of one computation of a step, eager or by replays.

    Attributes:
        losses: Loss of each micro-batch, 0-dim.
        gradients: Gradients as the optimizer reads them, one for each of its parameters. None for
            a parameter without a gradient.
        state: State after the update, by name as from `collect_live_state`.
    """

    losses: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    state: Mapping[str, Tensor]

    def copy(self) -> StepResult:
        return StepResult(self.losses, copy_list(self.gradients), copy_named(self.state))

    def distances(
        self, other: StepResult, before: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, float]]:
        """Yield `(name, distance)` for each tensor: its distance from the tensor of `other`.

        Distances are relative to the norm of the tensor. For a weight, the changes since the state
        `before` are compared.
        """
        norms = [float(gradient.norm()) for gradient in self.gradients if gradient is not None]
        largest = max(norms, default=0.0)
        losses = zip(self.losses, other.losses, strict=True)
        for number, pair in enumerate(losses, 1):
            yield f"loss of pass {number}", relative_error(*pair)
        gradients = zip(self.gradients, other.gradients, strict=True)
        for number, (one, two) in enumerate(gradients):
            if one is None or two is None:
                yield f"gradient {number}", 0.0 if one is two else float("inf")
            else:
                # A gradient that should be zero consists of rounding errors, hence the floor.
                yield f"gradient {number}", relative_error(one, two, floor=1e-3 * largest)
        for name, one in self.state.items():
            two = other.state[name]
            start = before[name]
            if name.startswith("weight "):
                floor = ULP / TOLERANCE["fp32"] * float(start.norm())
                yield name, relative_error(one - start, two - start, floor)
            else:
                yield name, relative_error(one, two)


def find_difference(
    evidence: Evidence,
    live: Mapping[str, Tensor],
    precision: str,
    replay: Callable[[], StepResult],
    ranks: ReplayingRanks,
) -> str | None:
    """Return the first difference between a replay and the eager step, as a message.

    Return None if the distances of all tensors are within the tolerance of `precision`, or
    within NOISE times the distances between two replays.

    Args:
        evidence: The evidence of the eager step.
        live: The live state. Afterwards its tensors have the same values as before.
        precision: The precision, which sets the tolerance.
        replay: Computes the step of the evidence by replays, from the live state.
        ranks: The ranks that replay together.
    """
    if ranks.is_any(not live.keys() == evidence.before.keys() == evidence.after.keys()):
        return "tensors of the model's or optimizer's state appear or disappear"
    saved = ranks.do(lambda: copy_named(live))
    losses = [eager.loss for eager in evidence.passes]
    eager_result = StepResult(losses, evidence.gradients, evidence.after)
    try:
        copy_into(live, evidence.before)
        first = replay()
        distances = ranks.do(lambda: dict(eager_result.distances(first, evidence.before)))
        too_far = {name: far for name, far in distances.items() if far > TOLERANCE[precision]}
        if not ranks.is_any(bool(too_far)):
            return None
        # Results of the same kernels may differ from call to call. The distance of a second replay
        # from the first measures this noise.
        kept = ranks.do(first.copy)
        copy_into(live, evidence.before)
        second = replay()
        noise = ranks.do(lambda: dict(kept.distances(second, evidence.before)))
        for name, distance in too_far.items():
            # Unlike `>`, the condition `not <=` also holds if the distance or the noise is NaN.
            if not distance <= NOISE * noise[name]:
                return f"{name} is {distance:.2g} of its norm apart"
        return None
    finally:
        copy_into(live, saved)

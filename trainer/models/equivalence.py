"""Proof that what replaces a model trains as the model does: both make the same training passes before the first step.

Compared are random states, plain attributes (counters), weights, buffers, gradients and outputs, over several passes:
what the first leaves behind shows in the second. Nothing of it is left. Both run the same operations on one device, so
tolerances are for the order of sums alone: whatever computes something else is further apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.errors import RecipeError
from trainer.models.undisturbed import attributes, generators, undisturbed

TOLERANCE = {"fp32": 1e-5, "tf32": 1e-5, "bf16": 1e-4, "fp16": 1e-4}  # of a tensor's norm


class Passes(NamedTuple):
    """What training passes did, by names."""

    tensors: list[dict[str, Tensor | None]]  # buffers and changed weights, before the first pass and after each
    attributes: list[dict[str, str]]  # plain ones, after each pass
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]  # of all passes, added up
    random: dict[str, object]  # generators, at the end


def observe(
    model: nn.Module,
    train: Callable[[], object],
    run: Callable[[Tensor], Tensor],
    inputs: Sequence[Tensor],
    after: Callable[[bool], object] = lambda last: None,
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> Passes:
    """Run training passes of a model, or of what replaces it and shares its weights, and undo them.

    Args:
        train: switches to training.
        run: a forward pass.
        inputs: a micro-batch (N, ...) for each pass.
        after: what ends a pass, behind its backward pass; told whether it is the last.
        parameters: this rank's own, where the model holds others by now.
    """
    parameters = dict(model.named_parameters()) if parameters is None else parameters
    kept = {name: (parameter.detach().clone(), parameter.grad) for name, parameter in parameters.items()}
    outputs, plain = list[Tensor](), list[dict[str, str]]()
    try:
        with undisturbed([model], inputs[0].device), torch.enable_grad():
            for parameter in parameters.values():
                parameter.grad = None
            train()
            tensors = [_tensors(model, parameters, kept)]
            for number, piece in enumerate(inputs, 1):
                out = run(piece)
                outputs.append(out.detach().clone())
                if out.requires_grad:  # no loss is needed: the gradients of its outputs are drawn
                    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
                    torch.autograd.backward(out, noise.to(out))
                after(number == len(inputs))
                tensors.append(_tensors(model, parameters, kept))
                plain.append(_attributes(model))
            gradients = {f"gradient of {name}": parameter.grad for name, parameter in parameters.items()}
            return Passes(tensors, plain, outputs, gradients, generators())
    finally:
        with torch.no_grad():
            for name, (value, gradient) in kept.items():
                parameters[name].copy_(value)
                parameters[name].grad = gradient


def _tensors(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], kept: Mapping[str, tuple[Tensor, Tensor | None]]
) -> dict[str, Tensor | None]:
    weights = {
        f"change of {name}": None if torch.equal(parameter, kept[name][0]) else parameter.detach().clone()
        for name, parameter in parameters.items()
    }
    return weights | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


def _attributes(model: nn.Module) -> dict[str, str]:
    """Numbers and words that a module has, and the length of what it collects."""
    found = {}
    for prefix, module in model.named_modules():
        for name, value in attributes(module).items():
            collected = isinstance(value, list | tuple | dict | set)
            if collected or isinstance(value, bool | int | float | str):
                found[f"attribute {prefix}{'.' * bool(prefix)}{name}"] = repr(len(value) if collected else value)
    return found


def _counted(passes: Passes) -> dict[str, tuple[str, str]]:
    """Attributes that go on changing: what is set once, like a size, counts nothing."""
    first, last = passes.attributes[0], passes.attributes[-1]
    return {name: (first.get(name, ""), value) for name, value in last.items() if first.get(name) != value}


def differences(whole: Passes, replaced: Passes, tolerance: float, floor: float = 0.0) -> Iterator[str]:
    """What differs, each as a noun with its distance; what tells most comes first."""
    for name, state in whole.random.items():
        if state != replaced.random[name]:
            yield f"random numbers of {name} (drawn more often in one of the two)"
    counted = _counted(whole), _counted(replaced)
    for name in counted[0] | counted[1]:
        if counted[0].get(name) != counted[1].get(name):
            yield f"{name} (counts on in one of the two)"
    pairs = [*zip(whole.tensors, replaced.tensors, strict=True), (whole.gradients, replaced.gradients)]
    pairs += [({"output": one}, {"output": other}) for one, other in zip(whole.outputs, replaced.outputs, strict=True)]
    for one, other in pairs:
        for name, value in one.items():
            if (apart := _apart(value, other[name], tolerance, floor)) is not None:
                yield f"{name} ({apart})"


def check_equivalent(what: str, whole: Passes, replaced: Passes, tolerance: float, floor: float = 0.0) -> None:
    """Raise RecipeError if `what` replaces a model, by its name, and trains another.

    Tensors may be `tolerance` x their norm apart, or x `floor` where that is more: gradients that should be zero are
    rounding errors, which another order of sums changes.
    """
    if found := [*differences(whole, replaced, tolerance, floor)]:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise RecipeError(
            f"{what} would train another model: in two passes of both what differs is the {found[0]}{more}; use "
            "mode=ddp, which runs the model as it is"
        )


def _apart(one: Tensor | None, other: Tensor | None, tolerance: float, floor: float = 0.0) -> str | None:
    """How far two tensors are from each other, None where they are alike."""
    if one is None or other is None:
        return None if one is other else "there in one of the two alone"
    if one.shape != other.shape or one.dtype != other.dtype:
        return "of another shape or type"
    if torch.equal(one, other):
        return None
    real = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in (one, other))
    first, second = (tensor.double().nan_to_num(1e30, 2e30, -2e30) for tensor in real)
    distance = ((first - second).norm() / first.norm().clamp(min=floor)).item()
    return None if distance <= tolerance else f"{distance:.2g} of its norm apart"


def changing(passes: Passes) -> list[str]:
    """The state that each forward pass changes: with more passes in a step it is another model."""
    before, after = passes.tensors[0], passes.tensors[-1]
    return [
        *_counted(passes),
        *(name for name in after if _apart(before[name], after[name], TOLERANCE["fp32"]) is not None),
    ]

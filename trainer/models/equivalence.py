"""Proof that what replaces a model trains as the model does: both make the same training passes before the first step.

Compared are outputs, gradients, weights, buffers, plain attributes (counters, tensors, arrays) and random states, over
two passes: what the first leaves behind shows in the second. Nothing of it is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from trainer.errors import RecipeError, is_out_of_memory
from trainer.models.undisturbed import attributes, generators, is_plain, undisturbed

# Of a tensor's norm. Both run the same operations on one device: whatever computes something else is further apart.
TOLERANCE = {"fp32": 1e-5, "tf32": 1e-5, "bf16": 1e-4, "fp16": 1e-4}
AS_IT_IS = "mode=ddp, which runs the model as it is"
NOISE = 8  # times as far apart as two replays are: what a kernel adds up in any order is no fault
Made = TypeVar("Made")
Tensors = dict[str, Tensor | None]


class Passes(NamedTuple):
    """What training passes did, by names."""

    # Buffers, attributes, changed weights, before the first pass and after each, with its output.
    tensors: list[Tensors]
    gradients: Tensors  # of all passes, added up
    plain: list[dict[str, object]]  # after each pass: attributes and generators


def fewest_rows(most: int, make: Callable[[int], Made], say: Callable[[str], None], name: str) -> Made | None:
    """What `make` gives with one row, or two, or `most`: as few as the model takes. None, and a line, where memory is
    too small."""
    for rows in sorted({1, 2, most}):
        try:
            return make(rows)
        except Exception as error:  # the model's code may raise anything
            if is_out_of_memory(error):
                say(f"WARNING: {name} is not compared with what replaces it: memory is too small for both")
                return None
            if rows >= most:
                raise
    return None


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
    # The very objects of now: one that a pass assigns anew, as its last activations, is no state that adds up.
    held = [(name, value) for name, value in attributes(model) if isinstance(value, Tensor | np.ndarray)]

    def state() -> Tensors:
        weights = ((f"change of {name}", p, kept[name][0]) for name, p in parameters.items())
        changed: Tensors = {name: None if torch.equal(p, was) else p.detach().clone() for name, p, was in weights}
        changed |= {name: _numbers(value) for name, value in held}
        return changed | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}

    plain = list[dict[str, object]]()
    try:
        with undisturbed([model], inputs[0].device), torch.enable_grad():
            for parameter in parameters.values():
                parameter.grad = None
            train()
            tensors = [state()]
            for number, piece in enumerate(inputs, 1):
                out = run(piece)
                if out.requires_grad:  # no loss is needed: the gradients of its outputs are drawn
                    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
                    torch.autograd.backward(out, noise.to(out))
                after(number == len(inputs))
                tensors.append(state() | {"output": out.detach()})
                plain.append(plain_attributes(model) | generators())
            return Passes(tensors, {f"gradient of {name}": p.grad for name, p in parameters.items()}, plain)
    finally:
        with torch.no_grad():
            for name, (value, gradient) in kept.items():
                parameters[name].copy_(value)
                parameters[name].grad = gradient


def plain_attributes(model: nn.Module, figures: bool = False) -> dict[str, object]:
    """Numbers and words that a module has, and the length of what it collects; `figures` in there too, which the
    rounding of a pass may change."""
    found: dict[str, object] = {}
    for name, value in attributes(model):
        collected = isinstance(value, list | tuple | dict | set)
        figure = not figures and isinstance(value, float) and name.endswith("]")
        if collected or (isinstance(value, bool | int | float | str) and not figure):
            found[name] = repr(len(value) if collected else value)
    return found


def _numbers(value: Any) -> Tensor | None:
    """A copy of those of a tensor or array that a pass can change in place."""
    if isinstance(value, Tensor):
        return value.to("cpu", copy=True) if is_plain(value) else None
    with suppress(TypeError, ValueError):  # an array of objects, or of a type that torch does not have
        return torch.from_numpy(value.copy()) if value.flags.writeable else None
    return None


def _counted(passes: Passes) -> dict[str, object]:
    """What goes on changing: an attribute that is set once, like a size, counts nothing."""
    first, last = passes.plain[0], passes.plain[-1]
    return {name: (first.get(name), value) for name, value in last.items() if first.get(name) != value}


def check_equivalent(
    what: str,
    whole: Passes,
    replaced: Passes,
    tolerance: float,
    floor: float = 0.0,
    instead: str = AS_IT_IS,
) -> None:
    """Raise RecipeError if `what` replaces a model, by its name, and trains another.

    Tensors may be `tolerance` x their norm apart, or x `floor` where that is more: gradients that should be zero are
    rounding errors, which another order of sums changes.
    """
    if found := [*_differences(whole, replaced, tolerance, floor)]:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise RecipeError(
            f"{what} would train another model: in two passes of both what differs is the {found[0]}{more}; use "
            f"{instead}"
        )


def _differences(whole: Passes, replaced: Passes, tolerance: float, floor: float) -> Iterator[str]:
    """Each as a noun with its distance; what tells most comes first."""
    counted = _counted(whole), _counted(replaced)
    for name in counted[0] | counted[1]:
        if counted[0].get(name) != counted[1].get(name):
            yield f"{name} (changed otherwise by one of the two)"
    pairs = zip([*whole.tensors, whole.gradients], [*replaced.tensors, replaced.gradients], strict=True)
    for one, other in pairs:
        for name, value in one.items():
            if (apart := _apart(value, other.get(name), tolerance, floor)) is not None:
                yield f"{name} ({apart})"


def distance(one: Tensor, other: Tensor, floor: float = 0.0) -> float:
    """The norm of the difference, as a share of the first one's norm, or of `floor` where that is more; infinite for
    tensors of other shapes or types."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if torch.equal(one, other):
        return 0.0
    real = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in (one, other))
    first, second = (tensor.double().nan_to_num(1e30, 2e30, -2e30) for tensor in real)
    return float((first - second).norm() / first.norm().clamp(min=floor))


def _apart(one: Tensor | None, other: Tensor | None, tolerance: float, floor: float = 0.0) -> str | None:
    """How far two tensors are from each other, None where they are alike."""
    if one is None or other is None:
        return None if one is other else "there in one of the two alone"
    if math.isinf(apart := distance(one, other, floor)):
        return "of another shape or type"
    return None if apart <= tolerance else f"{apart:.2g} of its norm apart"


def changing(passes: Passes) -> list[str]:
    """The state that each forward pass changes: with more passes in a step it is another model."""
    before, after, least = passes.tensors[0], passes.tensors[-1], TOLERANCE["fp32"]
    counted = [name for name in _counted(passes) if name.startswith("attribute ")]
    return counted + [name for name in before if _apart(before[name], after[name], least) is not None]


def draws(passes: Passes) -> bool:
    """Whether passes on the CPU draw of torch's generator."""
    return "random state of torch" in _counted(passes)

"""Models of shapes alone, on torch's meta device: copies of a model, and models that are built there."""

from __future__ import annotations

import copy
import gc
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer.errors import text_of
from trainer.models.memory import Allocations

SIMPLE = (bool, int, float, str, torch.dtype)


def without_values(model: nn.Module) -> nn.Module:
    """A copy on the meta device; values are not copied on the way."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if not is_lazy(tensor) and tensor.is_leaf:
            shape = tensor.detach().to("meta")
            trained = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(shape, tensor.requires_grad) if trained else shape
    memo |= {id(tensor): tensor.detach().to("meta") for tensor in computed(model)}
    return copy.deepcopy(model, memo).to("meta")


def computed(model: nn.Module) -> list[Tensor]:
    """Attributes that are computed of weights, as of pruned ones: torch refuses to copy such tensors."""
    attributes = (value for module in model.modules() for value in vars(module).values())
    return [value for value in attributes if isinstance(value, Tensor) and not value.is_leaf]


def built_on_meta(make: Callable[[], nn.Module]) -> tuple[nn.Module | None, str]:
    """What `make` gives where tensors have no values; or None, and why that would not be the model.

    What of a model has values after all is no parameter and no buffer, or it has looked at some: nobody could fill it.
    """
    drawn = torch.get_rng_state()
    try:
        with torch.device("meta"), Allocations(()) as made:
            model = make()
        held = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    except Exception as error:  # a user's code may raise anything at all
        return None, f"its code needs values: {type(error).__name__}: {' '.join(text_of(error).split())[:120]}"

    def hides() -> bool:
        return any(each.device.type == "meta" and each._cdata not in held for each in made.alive())

    if hides():
        gc.collect()  # what only refers to itself
    if hides():
        return None, "it holds a tensor that is no parameter and no buffer"
    if not torch.equal(drawn, torch.get_rng_state()):
        return None, "it draws random numbers on a device of its own choice"
    return model, ""


def description(model: nn.Module) -> str:
    """A digest of what a model is beside its values: modules with their plain attributes, and tensors."""
    lines: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        plain = {key: value for key, value in vars(module).items() if _is_simple(value)}
        lines.append((name, type(module).__qualname__, plain))
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        first: dict[int, str] = {}
        for name, tensor in named:
            kind = tuple(tensor.shape), tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter)
            lines.append((name, first.setdefault(id(tensor), name), *kind))
    return hashlib.sha256("\n".join(map(repr, lines)).encode()).hexdigest()


def _is_simple(value: Any) -> bool:
    return isinstance(value, SIMPLE) or (isinstance(value, tuple | list) and all(map(_is_simple, value)))


def give_values(tensor: Tensor, values: Tensor) -> None:
    """Put `values` in the place of a tensor, for all that refer to it."""
    kept = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
    torch.utils.swap_tensors(tensor, kept)  # type: ignore[no-untyped-call]

"""Hooks of a model's parameters, which torch's copies of a module leave out, and hooks that a copy cannot have."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

KINDS = {"_backward_hooks": "register_hook", "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook"}


def hooks_of(parameter: Tensor) -> list[tuple[str, Any]]:
    """Each with the method that registers it."""
    return [
        (method, hook) for place, method in KINDS.items() for hook in (getattr(parameter, place, None) or {}).values()
    ]


def hooks_by_name(model: nn.Module) -> dict[str, list[tuple[str, Any]]]:
    """The hooks of a model's parameters, where there are some."""
    return {name: hooks for name, parameter in model.named_parameters() if (hooks := hooks_of(parameter))}


def hang(model: nn.Module, hooks: dict[str, list[tuple[str, Any]]]) -> None:
    """Give a copy of a model the hooks that `hooks_by_name` found."""
    parameters = dict(model.named_parameters())
    for name, pairs in hooks.items():
        for method, hook in pairs:
            getattr(parameters[name], method)(hook)


def deep_copy(model: nn.Module) -> nn.Module:
    """A copy with the hooks of its parameters.

    Raises:
        ValueError: a function that belongs to it, as a hook, refers to the model itself, and would to the original.
    """
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(model, memo)
    hang(copied, copy.deepcopy(hooks_by_name(model), memo))
    theirs = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        for function in _functions([*vars(module).values(), *map(hooks_of, module.parameters(recurse=False))]):
            if any(id(value) in theirs for value in _held(function)):
                raise ValueError(f"a hook of {name or 'the model itself'} refers to the model that it belongs to")
    return copied


def _functions(values: Any) -> Iterator[FunctionType]:
    """Functions among attributes, and in dictionaries, lists and tuples of them."""
    for value in values:
        if isinstance(value, dict | list | tuple):
            yield from _functions(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, FunctionType):
            yield value


def _held(function: FunctionType) -> Iterator[Any]:
    """What a function keeps of where it was made; a copy of it keeps the same."""
    cells: tuple[CellType, ...] = function.__closure__ or ()
    yield from (cell.cell_contents for cell in cells)
    yield from function.__defaults__ or ()

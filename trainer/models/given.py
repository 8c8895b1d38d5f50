"""Models of the Python API: modules, and functions that make them."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torchvision
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from trainer.errors import RecipeError
from trainer.models.small import SMALL
from trainer.recipe.image_sizes import ImageSize

OFFERED = ("num_classes", "channels", "image_size")  # parameters that a function may have


class Given:
    """A model's builder, from a module or from a function that makes one.

    A module is copied, with its weights, so that a run does not change the caller's. A function or class is called with
    those of num_classes, channels and image_size that it has parameters for.
    """

    def __init__(self, source: nn.Module | Callable[..., nn.Module]) -> None:
        """Raises RecipeError for what is neither a module nor a function of `OFFERED`."""
        if isinstance(source, nn.Module):
            source = bare(source)
            if any(map(is_lazy, [*source.parameters(), *source.buffers()])):
                raise RecipeError("model= has lazy layers: call model(batch) once before")
            if (reason := not_in_a_copy(source)) is not None:
                raise RecipeError(f"model= {reason}, which no copy of it has: give a function that makes it")
            if not any(parameter.requires_grad for parameter in source.parameters()):
                raise RecipeError("model= has nothing to train: set requires_grad=True on some of its parameters")
        elif not callable(source):
            raise RecipeError(
                f"model= is a torch.nn.Module, a function that makes one, or a name as in model='cnn', "
                f"not {type(source).__name__}"
            )
        else:
            _wanted(source)
        self.source = source

    @property
    def name(self) -> str:
        """Its name in recipes and run folders; for a function of torchvision's the one there."""
        source = self.source
        while isinstance(source, functools.partial):
            source = source.func
        name = str(getattr(source, "__name__", type(source).__name__))
        known = (*SMALL, *torchvision.models.list_models(module=torchvision.models))
        if name in known:
            theirs = name not in SMALL and self.source is torchvision.models.get_model_builder(name)
            return name if theirs else f"my_{name}"
        return name if name.isidentifier() else "model"

    def __call__(self, num_classes: int, channels: int, image_size: ImageSize) -> nn.Module:
        if isinstance(self.source, nn.Module):
            return self._copied(self.source)
        offered = dict(zip(OFFERED, (num_classes, channels, image_size), strict=True))
        model = self.source(**{name: offered[name] for name in _wanted(self.source)})
        if not isinstance(model, nn.Module):
            raise RecipeError(f"model={self.name} must make a torch.nn.Module, and made {type(model).__name__}")
        return bare(model)

    def __getstate__(self) -> dict[str, Any]:
        """A module is sent to other processes on the CPU: they have other devices."""
        source = self.source
        if isinstance(source, nn.Module) and any(p.device.type != "cpu" for p in source.parameters()):
            source = self._copied(source)
        return {"source": source}

    def _copied(self, source: nn.Module) -> nn.Module:
        try:
            return copy.deepcopy(source).cpu()
        except Exception as error:  # a module may hold anything at all
            reason = " ".join(str(error).split())[:160]
            raise RecipeError(
                f"model={self.name} cannot be copied ({type(error).__name__}: {reason}): give a function that makes it"
            ) from None


def not_in_a_copy(model: nn.Module) -> str | None:
    """What torch leaves out of a module's copy, or leaves with the original."""
    own = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        attributes = vars(module).values()
        functions = [*attributes, *(hook for hooks in attributes if isinstance(hooks, dict) for hook in hooks.values())]
        cells = [cell for function in functions for cell in getattr(function, "__closure__", None) or ()]
        if any(cell != types.CellType() and id(cell.cell_contents) in own for cell in cells):  # one may be empty
            return f"has a function in {name or 'itself'} that refers to the model around it"
    return next((f"has a hook of a parameter, {name}" for name, p in model.named_parameters() if has_hooks(p)), None)


def has_hooks(parameter: Any) -> bool:
    """Whether something is done to its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def bare(model: nn.Module) -> nn.Module:
    """The module inside of DataParallel, DistributedDataParallel and torch.compile."""
    if isinstance(model, DataParallel | DistributedDataParallel):
        return bare(model.module)
    inner = getattr(model, "_orig_mod", None)  # torch.compile's
    return bare(inner) if isinstance(inner, nn.Module) else model


def _wanted(source: Callable[..., Any]) -> list[str]:
    """Which of `OFFERED` a function is called with."""
    try:
        parameters = inspect.signature(source).parameters.values()
    except (TypeError, ValueError):
        return []
    bound = source.keywords if isinstance(source, functools.partial) else {}
    absent = [
        each.name
        for each in parameters
        if each.default is each.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        and each.name not in OFFERED
    ]
    if absent:
        raise RecipeError(
            f"model= is called with those of {', '.join(OFFERED)} that it has, and needs {absent[0]}: "
            f"write model=lambda: ...({absent[0]}=...)"
        )
    return [each.name for each in parameters if each.name in OFFERED and each.name not in bound]

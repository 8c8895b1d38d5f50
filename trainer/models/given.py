"""Models that the Python API accepts: modules, and functions that build them."""

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

from trainer.errors import RecipeError, describe
from trainer.models.small import SMALL
from trainer.recipe.image_sizes import ImageSize
from trainer.recipe.known_names import torchvision_classifiers

# Names of the arguments with which a user's function is called, if it has parameters for them.
OFFERED = ("num_classes", "channels", "image_size")


class ModelBuilder:
    """Builder of a model from a user's module or function.

    A module is copied with its weights, so that a run does not change the caller's module. A
    function or class is called with those of the arguments num_classes, channels and image_size
    for which it has a parameter, and with those of `model.args`.
    """

    def __init__(self, source: nn.Module | Callable[..., nn.Module]) -> None:
        """Check the source.

        Raises:
            RecipeError: `source` is a module that cannot be copied or trained, a function that
                needs arguments other than those of `OFFERED`, or neither a module nor a function.
        """
        if isinstance(source, nn.Module):
            source = unwrap(source)
            tensors = [*source.parameters(), *source.buffers()]
            if any(map(is_lazy, tensors)):
                raise RecipeError("model= has lazy layers: call model(batch) once before")
            if (reason := not_in_a_copy(source)) is not None:
                raise RecipeError(
                    f"model= {reason}, which a copy would not have: pass a function that builds it"
                )
            if not any(parameter.requires_grad for parameter in source.parameters()):
                raise RecipeError(
                    "model= has nothing to train: set requires_grad=True on some of its parameters"
                )
        elif not callable(source):
            raise RecipeError(
                "model= must be a torch.nn.Module, a function that builds one, or a name as in "
                f"model='cnn', not {type(source).__name__}"
            )
        else:
            _select_parameters(source)
        self.source = source

    @property
    def name(self) -> str:
        """Name of the model in recipes and run directories.

        A function of torchvision keeps its name. Any other function that has the name of a small
        model or of a torchvision model gets the prefix `my_`. A name that is not an identifier,
        such as `<lambda>`, is replaced by `model`.
        """
        source = self.source
        while isinstance(source, functools.partial):
            source = source.func
        name = str(getattr(source, "__name__", type(source).__name__))
        if name in SMALL:
            return f"my_{name}"
        if name in torchvision_classifiers():
            is_own = self.source is not torchvision.models.get_model_builder(name)
            return f"my_{name}" if is_own else name
        return name if name.isidentifier() else "model"

    def __call__(
        self,
        num_classes: int,
        channels: int,
        image_size: ImageSize,
        **own_arguments: Any,
    ) -> nn.Module:
        if isinstance(self.source, nn.Module):
            return self._copy(self.source)
        offered = dict(zip(OFFERED, (num_classes, channels, image_size), strict=True))
        arguments = {name: offered[name] for name in _select_parameters(self.source)}
        model = self.source(**arguments, **own_arguments)
        if not isinstance(model, nn.Module):
            raise RecipeError(
                f"model={self.name} must return a torch.nn.Module, not {type(model).__name__}"
            )
        return unwrap(model)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with the module on the CPU, because processes have different devices."""
        source = self.source
        if isinstance(source, nn.Module):
            device_types = {parameter.device.type for parameter in source.parameters()}
            if device_types - {"cpu"}:
                source = self._copy(source)
        return {"source": source}

    def _copy(self, source: nn.Module) -> nn.Module:
        try:
            return copy.deepcopy(source).cpu()
        except Exception as error:
            # A user's module may contain objects that cannot be copied.
            raise RecipeError(
                f"model={self.name} cannot be copied ({describe(error)}): pass a function that "
                "builds it"
            ) from None


def not_in_a_copy(model: nn.Module) -> str | None:
    """Describe the first part of a module that a copy would lack, or share with the original.

    A copy lacks the hooks of parameters. A copied function still refers to the original.

    Returns:
        Clause for a message, or None if the copy would be complete.
    """
    own = set(map(id, model.modules()))
    own.update(map(id, model.parameters()))
    own.update(map(id, model.buffers()))
    empty_cell = types.CellType()
    for name, module in model.named_modules():
        functions = [*vars(module).values()]
        for attribute in vars(module).values():
            if isinstance(attribute, dict):
                functions += attribute.values()
        for function in functions:
            for cell in getattr(function, "__closure__", None) or ():
                if cell != empty_cell and id(cell.cell_contents) in own:
                    return (
                        f"has a function in {name or 'itself'} that refers to the model around it"
                    )
    for name, parameter in model.named_parameters():
        if has_hooks(parameter):
            return f"has a hook of a parameter, {name}"
    return None


def has_hooks(parameter: Any) -> bool:
    """Return whether a parameter has hooks on its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def unwrap(model: nn.Module) -> nn.Module:
    """Unwrap a model from DataParallel, DistributedDataParallel and torch.compile."""
    if isinstance(model, DataParallel | DistributedDataParallel):
        return unwrap(model.module)
    # torch.compile keeps the original model in this attribute.
    inner = getattr(model, "_orig_mod", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


def _select_parameters(source: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments in `OFFERED` that a function should be called with.

    Raises:
        RecipeError: The function needs another argument.
    """
    try:
        parameters = inspect.signature(source).parameters.values()
    except (TypeError, ValueError):
        return []
    bound = {}
    if isinstance(source, functools.partial):
        bound = source.keywords
    selected = []
    for parameter in parameters:
        name = parameter.name
        if name in OFFERED:
            if name not in bound:
                selected.append(name)
            continue
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variadic:
            raise RecipeError(
                f"model= is called with those of {', '.join(OFFERED)} that it has parameters for, "
                f"and also needs {name}: write model=lambda: ...({name}=...)"
            )
    return selected

"""torchvision's classifiers by name, and the weights that it publishes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from http.client import HTTPException
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from trainer.errors import RecipeError, SetupError, is_out_of_memory, text_of
from trainer.recipe import ModelRecipe
from trainer.recipe.image_sizes import ImageSize, sides, square
from trainer.recipe.known_names import AUXILIARY
from trainer.saving import locks

OLDER = {  # names in published files of DenseNet and ViT, and what torchvision calls them since
    r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)": r"\1\2",
    r"(encoder_layer_\d+\.mlp)\.linear_1\.": r"\1.0.",
    r"(encoder_layer_\d+\.mlp)\.linear_2\.": r"\1.3.",
}


def names() -> list[str]:
    """All that there are."""
    return list(torchvision.models.list_models(module=torchvision.models))


def create(recipe: ModelRecipe, num_classes: int, channels: int, image_size: ImageSize, starting: bool) -> nn.Module:
    """The model, with the weights that torchvision publishes where the recipe asks for them and `starting` is set.

    Raises:
        RecipeError: other channels than 3 where inputs are transformed, or weights that are not published.
        SetupError: the weights cannot be fetched or read.
        AssertionError: it cannot be made for images of that size.
    """
    if channels != 3 and recipe.name in AUXILIARY:  # they mix the three into the weights' normalisation
        raise RecipeError(
            f"model.name={recipe.name} reads 3 channels and the images have {channels}: set data.channels=3"
        )
    builder = torchvision.models.get_model_builder(recipe.name)
    options = _options(recipe, image_size)
    if recipe.weights is None or recipe.init_from is not None or not starting:
        quick = {"init_weights": True} if recipe.name in AUXILIARY else {}  # without, torchvision warns that it is slow
        try:
            return _reading(builder(num_classes=num_classes, **options, **quick), channels, started=False)
        except ValueError as error:  # MaxViT's windows
            raise AssertionError(str(error)) from None
    weights = published(recipe)
    options = {} if recipe.name in AUXILIARY else options  # published files have the heads, which go afterwards
    model: Any = _started(builder, weights, options, recipe.weights)
    if recipe.name == "inception_v3":
        model.aux_logits, model.AuxLogits = False, None
    classes = known_classes(recipe)
    if classes != num_classes:
        replace_head(model, classes, num_classes)
    return _reading(model, channels, started=True)


def _reading(model: nn.Module, channels: int, started: bool) -> nn.Module:
    """The model with a first layer for other channels: its weights `adapted`, or as many new ones of such a spread that
    its outputs vary as much."""
    if channels != 3:
        first = next(part for part in model.modules() if isinstance(part, nn.Conv2d))
        old = first.weight.detach()
        drawn = torch.empty(len(old), channels, *old.shape[2:]).normal_() * (old.std() * (3 / channels) ** 0.5)
        first.in_channels, first.weight = channels, nn.Parameter(adapted(old, channels) if started else drawn)
    return model


def adapted(weight: Tensor, channels: int) -> Tensor:
    """Filters of three channels (out, 3, h, w) for images of `channels`: summed for one, else repeated in turn and
    scaled by 3 / channels, as timm does (timm/models/_manipulate.py, adapt_input_conv)."""
    if channels == 1:
        return weight.sum(1, keepdim=True)
    return weight.repeat(1, -(-channels // 3), 1, 1)[:, :channels] * (3 / channels)


def _started(builder: Callable[..., Any], weights: Any, options: dict[str, Any], asked: str | None) -> nn.Module:
    """A model with published weights, which one process a machine downloads."""
    file = Path(torch.hub.get_dir(), "checkpoints", weights.url.rpartition("/")[2])
    there = file.exists()
    try:
        with nullcontext() if there else locks.in_turn(file.parent, f".{file.name}.lock"):
            model: nn.Module = builder(weights=weights, **options)
            return model
    except (OSError, HTTPException, RuntimeError, EOFError, UnpicklingError) as error:
        if is_out_of_memory(error):
            raise
        if there and not isinstance(error, PermissionError):
            raise SetupError(f"{file} is damaged ({text_of(error)[:160]}): remove it and type the same again") from None
        # no network, one that breaks off, no room for the file, or another file than was published
        raise SetupError(
            f"model.weights={asked} cannot be downloaded ({text_of(error)}); put {weights.url} at {file}, "
            "or start from a file: model.weights=null model.init_from=FILE"
        ) from None


def published(recipe: ModelRecipe) -> Any:
    """torchvision's entry of the weights that the recipe names. Raises RecipeError where there is none."""
    known = torchvision.models.get_model_weights(recipe.name).__members__
    entries = {
        name: entry for name, entry in known.items() if entry.meta["categories"]
    }  # without, the last layer is NaN
    if recipe.weights not in entries:
        what = f"model.weights={recipe.weights} is not published for {recipe.name} with a classifier"
        raise RecipeError(f"{what}; there are {', '.join(entries)}")
    return entries[recipe.weights]


def known_classes(model: ModelRecipe) -> int:
    return len(published(model).meta["categories"])


def preset(model: ModelRecipe) -> tuple[Any, Any, Any]:
    """Mean, standard deviation and, for torchvision's own weights, image size of what a model starts from; None each
    where photos have these anyway. Raises RecipeError for weights that are not published."""
    if model.name not in names() or (model.weights, model.init_from) == (None, None):
        return None, None, None
    wanted = published(model.model_copy(update={"weights": model.weights or "DEFAULT"})).transforms()
    usual = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    size = wanted.crop_size[0] if model.init_from is None and wanted.crop_size != usual.crop_size else None
    return (None, None, size) if wanted.mean == usual.mean else (wanted.mean, wanted.std, size)


def renamed(weights: Mapping[str, Tensor], known: Collection[str]) -> dict[str, Tensor]:
    """Weights with the names that torchvision's models have now, but for those that the model has: `known`."""
    found = {name: name for name in weights}
    for pattern, now in OLDER.items():
        found |= {old: re.sub(pattern, now, name) for old, name in found.items() if old not in known}
    return {found[name]: tensor for name, tensor in weights.items()}


def _options(recipe: ModelRecipe, image_size: ImageSize) -> dict[str, Any]:
    """Arguments of torchvision's builder besides the number of classes."""
    options: dict[str, Any] = {}
    if recipe.name.startswith("vit_"):
        started = recipe.weights is not None
        options["image_size"] = published(recipe).meta["min_size"][0] if started else square(image_size)
    if recipe.name.startswith("maxvit_") and recipe.weights is None:
        options["input_size"] = sides(image_size)
    if recipe.name in AUXILIARY:
        options["aux_logits"] = False  # with the heads the output would be a tuple
        if recipe.weights is not None:
            options["transform_input"] = True  # the model then converts inputs to the weights' normalisation
    return options


def bare(recipe: ModelRecipe, num_classes: int, image_size: ImageSize) -> str:
    """The call that makes the bare model."""
    options = {"num_classes": num_classes, **_options(recipe, image_size)}
    options |= {"init_weights": False} if recipe.name in AUXILIARY else {}  # they are loaded
    return f"torchvision.models.{recipe.name}({', '.join(f'{key}={value}' for key, value in options.items())})"


def replace_head(model: nn.Module, old: int, new: int) -> str:
    """Put a fresh last layer with `new` outputs where the one with `old` outputs was; returns its name."""
    layers: dict[str, Any] = {
        name: part for name, part in model.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)
    }
    name, layer = [(name, layer) for name, layer in layers.items() if len(layer.weight) == old][-1]
    bias, linear = layer.bias is not None, isinstance(layer, nn.Linear)
    fresh = nn.Linear(layer.in_features, new, bias) if linear else nn.Conv2d(layer.in_channels, new, 1, bias=bias)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, fresh)
    return name

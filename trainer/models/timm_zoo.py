"""Models of timm, PyTorch Image Models, by name: model.name=timm:NAME. timm is imported when one is built."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import nn

from trainer.errors import RecipeError, SetupError, text_of
from trainer.recipe import ModelRecipe
from trainer.recipe.image_sizes import ImageSize
from trainer.recipe.known_names import TIMM


def create(recipe: ModelRecipe, num_classes: int, channels: int, image_size: ImageSize, starting: bool) -> nn.Module:
    """The model, with the weights that timm publishes where the recipe asks for them and `starting` is set.

    Raises:
        RecipeError: timm is not installed, or has no such model or weights.
        SetupError: the weights cannot be fetched.
    """
    timm, name = _checked(recipe)
    options = {"num_classes": num_classes, "in_chans": channels}
    pretrained = starting and recipe.weights is not None
    try:
        return _created(timm, name, image_size, **options, pretrained=pretrained)
    except Exception as error:  # downloads raise anything at all
        if not pretrained and isinstance(error, RuntimeError | ValueError):
            raise AssertionError(text_of(error)) from None  # it does not take images of this shape
        if not pretrained:
            raise
        place = timm.get_pretrained_cfg(name).hf_hub_id or "its page"
        raise SetupError(
            f"model.weights={recipe.weights} of {recipe.name} cannot be downloaded ({type(error).__name__}); copy what "
            f"another machine's ~/.cache/huggingface/hub has of {place} to this one's, or start from its "
            "model.safetensors: model.weights=null model.init_from=FILE"
        ) from None


def bare(name: str, num_classes: int, channels: int, image_size: ImageSize) -> str:
    """The call that makes the bare model."""
    sized = f", img_size={image_size}" if _takes_size(name) else ""
    return f"timm.create_model('{name.removeprefix(TIMM)}', num_classes={num_classes}, in_chans={channels}{sized})"


def preset(model: ModelRecipe) -> tuple[Any, Any, Any]:
    """timm's mean, standard deviation and, where it starts from weights, image size; None each where it has none.

    Raises:
        RecipeError: timm is not installed.
    """
    timm, name = _timm(model.name), _tagged(model)
    known = timm.is_model(name) and ("." not in name or name in _published(timm, name))  # else building it raises
    if not known or (config := timm.get_pretrained_cfg(name)) is None:
        return None, None, None
    size = config.input_size[1:] if (model.weights, model.init_from) != (None, None) else None
    return list(config.mean), list(config.std), size


def known_classes(model: ModelRecipe) -> int:
    timm, name = _checked(model)
    return int(timm.get_pretrained_cfg(name).num_classes)


def _timm(name: str) -> Any:
    try:
        import timm
    except ImportError as error:
        raise RecipeError(f"model.name={name} needs the package timm ({error}): pip install timm") from None
    return timm


def _tagged(recipe: ModelRecipe) -> str:
    """timm's name of a model and its weights: resnet18, or resnet18.a1_in1k."""
    name = recipe.name.removeprefix(TIMM)
    return name if recipe.weights in (None, "DEFAULT") else f"{name.partition('.')[0]}.{recipe.weights}"


def _checked(recipe: ModelRecipe) -> tuple[Any, str]:
    """timm, and its name of a model that it has, with the weights that the recipe asks for. Raises RecipeError."""
    timm, name = _timm(recipe.name), _tagged(recipe)
    if not timm.is_model(name):
        raise RecipeError(f"model.name={recipe.name} is not a model of timm; timm.list_models() lists its models")
    if recipe.weights is not None or "." in name:
        _check_weights(timm, recipe, name)
    return timm, name


def _check_weights(timm: Any, recipe: ModelRecipe, name: str) -> None:
    known = _published(timm, name)
    if not known:
        raise RecipeError(
            f"model.weights={recipe.weights}: timm publishes none for {recipe.name}; model.weights=null starts without"
        )
    if "." in name and name not in known:
        model, _, tag = name.partition(".")
        tags = ", ".join(other.partition(".")[2] for other in known[:6])
        raise RecipeError(f"model.weights={tag} is not published for {TIMM}{model}; there are {tags}, DEFAULT")


def _published(timm: Any, name: str) -> list[str]:
    """timm's names of a model with each of its published weights."""
    names: list[str] = timm.list_pretrained(f"{name.partition('.')[0]}.*")
    return names


@lru_cache
def _takes_size(name: str) -> bool:
    """Whether a model is made for one size of images, which is an argument."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            _timm(name).create_model(name.removeprefix(TIMM), img_size=7 * 32)
    except TypeError:
        return False
    except Exception:  # it has the argument, and refuses the size
        return True
    return True


def _created(timm: Any, name: str, image_size: ImageSize, **options: Any) -> nn.Module:
    try:
        model: nn.Module = timm.create_model(name, **options, img_size=image_size)
    except TypeError:  # it takes any size
        model = timm.create_model(name, **options)
    return model

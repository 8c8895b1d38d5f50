"""Models of timm (PyTorch Image Models) by name: `model.name=timm:NAME`.

timm is an optional dependency. It is imported only if a recipe names one of its models.
"""

from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from trainer.errors import RecipeError, SetupError, load_extra, read_text
from trainer.models.builder_arguments import check_class_arguments
from trainer.recipe import ModelRecipe
from trainer.recipe.image_sizes import ImageSize
from trainer.recipe.known_names import TIMM


def create(
    recipe: ModelRecipe,
    num_classes: int,
    channels: int,
    image_size: ImageSize,
    starting: bool,
) -> nn.Module:
    """Build a timm model, with published weights if the recipe and `starting` ask for them.

    Raises:
        RecipeError: timm is not installed, or has no such model or weights, or an argument in
            `args` is wrong.
        SetupError: The weights cannot be downloaded.
        AssertionError: The model cannot be built for images of that size.
    """
    timm, name = _find_model(recipe)
    is_pretrained = starting and recipe.weights is not None
    options = {"num_classes": num_classes, "in_chans": channels, "pretrained": is_pretrained}
    for key, value in recipe.args.items():
        if value is None:
            raise RecipeError(
                f"model.args.{key}=null: timm ignores an argument that is null; leave it out"
            )
    if recipe.args:
        build = partial(timm.create_model, name)
        options |= check_class_arguments(recipe, build, {}, is_pretrained)
    try:
        try:
            model: nn.Module = timm.create_model(name, **options, img_size=image_size)
        except TypeError:
            # Models for images of any size have no argument `img_size`.
            model = timm.create_model(name, **options)
        return model
    except Exception as error:
        if not is_pretrained:
            if isinstance(error, RuntimeError | ValueError):
                # The model cannot read images of this shape.
                raise AssertionError(read_text(error)) from None
            raise
        # A download may raise any error.
        repository = timm.get_pretrained_cfg(name).hf_hub_id or "its page"
        raise SetupError(
            f"model.weights={recipe.weights} of {recipe.name} cannot be downloaded "
            f"({type(error).__name__}); copy {repository} from another machine's "
            "~/.cache/huggingface/hub to this one's, or start from its model.safetensors: "
            "model.weights=null model.init_from=FILE"
        ) from None


def bare(
    recipe: ModelRecipe,
    num_classes: int,
    channels: int,
    image_size: ImageSize,
) -> str:
    """Format the call that builds the same model with timm alone."""
    timm_name = recipe.name.removeprefix(TIMM)
    rest = f", img_size={image_size}" if _has_size_argument(recipe.name) else ""
    for name, value in recipe.args.items():
        rest += f", {name}={value!r}"
    return f"timm.create_model('{timm_name}', num_classes={num_classes}, in_chans={channels}{rest})"


def read_preset(model: ModelRecipe) -> tuple[Any, Any, Any]:
    """Return mean, standard deviation and image size of a model's preprocessing in timm.

    Values that timm does not list are None. The image size is also None for random weights, because
    no size suits them better than another.

    Raises:
        RecipeError: timm is not installed.
    """
    timm = _import_timm(model.name)
    name = _add_tag(model)
    # An unknown name raises no error here, because building the model reports it.
    is_known = timm.is_model(name) and ("." not in name or name in _list_pretrained(timm, name))
    if not is_known or (config := timm.get_pretrained_cfg(name)) is None:
        return None, None, None
    size = None
    if (model.weights, model.init_from) != (None, None):
        size = config.input_size[1:]
    return list(config.mean), list(config.std), size


def count_classes(model: ModelRecipe) -> int:
    """Return the number of classes of a model's published weights."""
    timm, name = _find_model(model)
    return int(timm.get_pretrained_cfg(name).num_classes)


def _import_timm(name: str) -> Any:
    try:
        return load_extra(f"model.name={name}", "timm")
    except SetupError as error:
        raise RecipeError(str(error)) from None


def _add_tag(recipe: ModelRecipe) -> str:
    """Return timm's name of a model and its weights: resnet18, or resnet18.a1_in1k."""
    name = recipe.name.removeprefix(TIMM)
    if recipe.weights in (None, "DEFAULT"):
        return name
    return f"{name.partition('.')[0]}.{recipe.weights}"


def _find_model(recipe: ModelRecipe) -> tuple[Any, str]:
    """Return the imported package timm, and timm's name for the recipe's model and weights.

    Raises:
        RecipeError: timm is not installed, or has no such model or weights.
    """
    timm = _import_timm(recipe.name)
    name = _add_tag(recipe)
    if not timm.is_model(name):
        raise RecipeError(
            f"model.name={recipe.name} is not a model of timm; timm.list_models() lists its models"
        )
    if recipe.weights is None and "." not in name:
        return timm, name
    pretrained_names = _list_pretrained(timm, name)
    if not pretrained_names:
        raise RecipeError(
            f"model.weights={recipe.weights}: timm publishes none for {recipe.name}; type "
            "model.weights=null to start from random weights"
        )
    if "." in name and name not in pretrained_names:
        model, _, tag = name.partition(".")
        tags = ", ".join(other.partition(".")[2] for other in pretrained_names[:6])
        raise RecipeError(
            f"model.weights={tag} is not published for {TIMM}{model}; there are {tags}, DEFAULT"
        )
    return timm, name


def _list_pretrained(timm: Any, name: str) -> list[str]:
    """List timm's names for the published weights of a model."""
    return list(timm.list_pretrained(f"{name.partition('.')[0]}.*"))


@lru_cache
def _has_size_argument(name: str) -> bool:
    """Return whether the constructor of a model has an argument for the image size."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            _import_timm(name).create_model(name.removeprefix(TIMM), img_size=7 * 32)
    except TypeError:
        return False
    except Exception:
        # The model has the argument, but does not allow this size.
        pass
    return True

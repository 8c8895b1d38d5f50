"""torchvision's classifiers by name, and their published weights."""

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from http.client import HTTPException
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from trainer.errors import RecipeError, SetupError, is_out_of_memory, read_line
from trainer.models.blocks import find_head
from trainer.models.builder_arguments import check_class_arguments
from trainer.recipe import ModelRecipe
from trainer.recipe.image_sizes import ImageSize, sides, square
from trainer.recipe.known_names import AUXILIARY, torchvision_classifiers
from trainer.saving import locks

# Patterns of old tensor names in published files of DenseNet and ViT, and their replacements.
OLDER = {
    r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)": r"\1\2",
    r"(encoder_layer_\d+\.mlp)\.linear_1\.": r"\1.0.",
    r"(encoder_layer_\d+\.mlp)\.linear_2\.": r"\1.3.",
}


def create(
    recipe: ModelRecipe,
    num_classes: int,
    channels: int,
    image_size: ImageSize,
    starting: bool,
) -> nn.Module:
    """Build a torchvision model, with published weights if the recipe and `starting` ask for them.

    Raises:
        RecipeError: The weights are not published, an argument in `args` is wrong, or the images do
            not have the 3 channels that a model with built-in input normalization needs.
        SetupError: The weights cannot be downloaded or read.
        AssertionError: The model cannot be built for images of that size.
    """
    # These models convert three channels to the normalization of their published weights, so they
    # cannot read images with another number of channels.
    if channels != 3 and recipe.name in AUXILIARY:
        raise RecipeError(
            f"model.name={recipe.name} reads 3 channels and the images have {channels}: set "
            "data.channels=3"
        )
    builder = torchvision.models.get_model_builder(recipe.name)
    options = _builder_options(recipe, image_size)
    is_pretrained = recipe.weights is not None and recipe.init_from is None and starting
    arguments: dict[str, Any] = {}
    if recipe.args:
        fixed = dict(options)
        # The models of a check need no weights.
        if recipe.name in AUXILIARY:
            fixed["init_weights"] = False
        arguments = check_class_arguments(recipe, partial(builder, **fixed), fixed, is_pretrained)
    model: nn.Module
    if is_pretrained:
        # Published files contain the auxiliary heads, so the model must be built with them.
        if recipe.name in AUXILIARY:
            options = {}
        weights = find_published(recipe)
        model = _fetch_model(builder, weights, options | arguments, recipe.weights)
        if recipe.name == "inception_v3":
            inception: Any = model
            inception.aux_logits = False
            inception.AuxLogits = None
        if count_classes(recipe) != num_classes:
            replace_head(model, num_classes)
    else:
        # torchvision warns about slow initialization if this option is not set.
        if recipe.name in AUXILIARY:
            options["init_weights"] = True
        try:
            model = builder(num_classes=num_classes, **options, **arguments)
        except ValueError as error:
            # MaxViT divides the image into windows, which is not possible for every size.
            raise AssertionError(str(error)) from None
    _set_channels(model, channels, is_pretrained)
    return model


def _set_channels(
    model: nn.Module,
    channels: int,
    is_pretrained: bool,
) -> None:
    """Change the number of input channels of the first convolution.

    Pretrained weights are adapted (see `adapt_filters`). Random weights are drawn with a standard
    deviation that keeps the variance of the outputs.
    """
    if channels == 3:
        return
    first = next(part for part in model.modules() if isinstance(part, nn.Conv2d))
    old = first.weight.detach()
    # Random weights are drawn even if they are replaced, so that later random numbers do not depend
    # on `is_pretrained`.
    weight = torch.empty(len(old), channels, *old.shape[2:])
    weight.normal_()
    weight *= old.std() * (3 / channels) ** 0.5
    if is_pretrained:
        weight = adapt_filters(old, channels)
    first.in_channels = channels
    first.weight = nn.Parameter(weight)


def adapt_filters(weight: Tensor, channels: int) -> Tensor:
    """Convert filters for three channels (out, 3, h, w) to filters for `channels`.

    For a single channel, the three filters are added up. For any other number, they are repeated in
    order and scaled by 3 / channels, as in timm (timm/models/_manipulate.py, adapt_input_conv).
    """
    if channels == 1:
        return weight.sum(1, keepdim=True)
    repeated = weight.repeat(1, -(-channels // 3), 1, 1)
    return repeated[:, :channels] * (3 / channels)


def _fetch_model(
    builder: Callable[..., Any],
    weights: Any,
    options: dict[str, Any],
    name: str | None,
) -> nn.Module:
    """Build a model with published weights. One process per machine downloads them."""
    file_name = weights.url.rpartition("/")[2]
    file = Path(torch.hub.get_dir(), "checkpoints", file_name)
    is_downloaded = file.exists()
    try:
        lock = (
            nullcontext()
            if is_downloaded
            else locks.wait_for_lock(file.parent, f".{file.name}.lock")
        )
        with lock:
            model: nn.Module = builder(weights=weights, **options)
            return model
    except (OSError, HTTPException, RuntimeError, EOFError, UnpicklingError) as error:
        if is_out_of_memory(error):
            raise
        if is_downloaded and not isinstance(error, PermissionError):
            raise SetupError(
                f"{file} is damaged ({read_line(error)}): remove it and type the same again"
            ) from None
        # The network may fail, the disk may be full, or the file may differ from the published one.
        raise SetupError(
            f"model.weights={name} cannot be downloaded ({read_line(error)}); put {weights.url} at "
            f"{file}, or start from a file: model.weights=null model.init_from=FILE"
        ) from None


def find_published(recipe: ModelRecipe) -> Any:
    """Return torchvision's entry for the weights that the recipe names.

    Raises:
        RecipeError: No weights of that name are published.
    """
    entries = {}
    for name, entry in torchvision.models.get_model_weights(recipe.name).__members__.items():
        # Weights without categories are left out, because the values of their last layer are NaN.
        if entry.meta["categories"]:
            entries[name] = entry
    if recipe.weights not in entries:
        raise RecipeError(
            f"model.weights={recipe.weights} is not published for {recipe.name} with a classifier; "
            f"there are {', '.join(entries)}"
        )
    return entries[recipe.weights]


def count_classes(model: ModelRecipe) -> int:
    """Return the number of classes of a model's published weights."""
    return len(find_published(model).meta["categories"])


def read_preset(model: ModelRecipe) -> tuple[Any, Any, Any]:
    """Return mean, standard deviation and image size of the preprocessing of a model's weights.

    Values that equal those of ResNet-18, which are usual for photos, are returned as None. The
    image size is also None with `init_from`. All values are None for random weights and for models
    that are not torchvision's.

    Raises:
        RecipeError: The weights are not published.
    """
    is_random = model.weights is None and model.init_from is None
    if is_random or model.name not in torchvision_classifiers():
        return None, None, None
    weights = find_published(model.model_copy(update={"weights": model.weights or "DEFAULT"}))
    transforms = weights.transforms()
    usual = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    size = None
    if model.init_from is None and transforms.crop_size != usual.crop_size:
        size = transforms.crop_size[0]
    if transforms.mean == usual.mean:
        return None, None, size
    return transforms.mean, transforms.std, size


def rename_weights(
    weights: Mapping[str, Tensor],
    known: Collection[str],
) -> dict[str, Tensor]:
    """Rename weights of older torchvision versions, except those whose names are in `known`."""
    tensors = {}
    for name, tensor in weights.items():
        current = name
        if name not in known:
            for pattern, replacement in OLDER.items():
                current = re.sub(pattern, replacement, current)
        tensors[current] = tensor
    return tensors


def _builder_options(
    recipe: ModelRecipe,
    image_size: ImageSize,
) -> dict[str, Any]:
    """Return the arguments of torchvision's builder, without the number of classes."""
    options: dict[str, Any] = {}
    if recipe.name.startswith("vit_"):
        if recipe.weights is None:
            options["image_size"] = square(image_size)
        else:
            options["image_size"] = find_published(recipe).meta["min_size"][0]
    if recipe.name.startswith("maxvit_") and recipe.weights is None:
        options["input_size"] = sides(image_size)
    if recipe.name in AUXILIARY:
        # With auxiliary heads, the output in training would be a tuple, so they are left out.
        options["aux_logits"] = False
        if recipe.weights is not None:
            # With this option the model converts its inputs to the normalization of the weights.
            options["transform_input"] = True
    return options


def bare(recipe: ModelRecipe, num_classes: int, image_size: ImageSize) -> str:
    """Format the call that builds the same model with torchvision alone."""
    options = {"num_classes": num_classes, **_builder_options(recipe, image_size), **recipe.args}
    # The weights are loaded afterwards, so initializing them would waste time.
    if recipe.name in AUXILIARY:
        options["init_weights"] = False
    arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return f"torchvision.models.{recipe.name}({arguments})"


def replace_head(model: nn.Module, outputs: int) -> None:
    """Replace the last linear or convolutional layer by one with `outputs` outputs."""
    name = find_head(model)
    head: Any = model.get_submodule(name)
    has_bias = head.bias is not None
    layer: nn.Module
    if isinstance(head, nn.Linear):
        layer = nn.Linear(head.in_features, outputs, has_bias)
    else:
        layer = nn.Conv2d(head.in_channels, outputs, 1, bias=has_bias)
    model.set_submodule(name, layer)

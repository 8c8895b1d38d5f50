"""Choose image size, channels, mean and standard deviation that suit the initial weights."""

import json
from contextlib import suppress
from typing import Any

from trainer.errors import CheckpointError, RecipeError
from trainer.models import timm_zoo, torchvision_zoo
from trainer.models.zoo import resolve_arguments, resolve_weights
from trainer.recipe import Recipe
from trainer.recipe.known_names import OWN_PHOTOS, TIMM
from trainer.saving.run_names import find_run
from trainer.saving.weights import read_metadata


def add_pretrained_input(recipe: Recipe) -> Recipe:
    """Return a recipe with the preprocessing of its initial weights.

    `model.weights` and `model.args` become the results of `resolve_weights` and
    `resolve_arguments`. If the recipe trains on the user's own
    photos, the keys of `data` that it leaves open get the values of the run in `model.init_from`,
    of torchvision's weights, or of timm's model.

    Raises:
        RecipeError: The weights are not published, or timm is not installed.
    """
    if (weights := resolve_weights(recipe.model)) != recipe.model.weights:
        recipe = recipe.replace(model__weights=weights)
    if (arguments := resolve_arguments(recipe.model)) != recipe.model.args:
        recipe = recipe.replace(model__args=arguments)
    if recipe.data.name not in OWN_PHOTOS:
        return recipe
    preset = {}
    if recipe.model.init_from is not None and (stored := _read_stored(recipe.model.init_from)):
        # Mean and deviation of gray images also fit color images, and vice versa. Any other number
        # of channels must equal the stored one. Otherwise mean and deviation are left out here and
        # measured later.
        if (recipe.data.channels or 3) not in (1, 3, stored["channels"]):
            del stored["mean"], stored["std"]
        for key, value in stored.items():
            if getattr(recipe.data, key) is None:
                preset[f"data__{key}"] = value
        # Invalid values of a damaged file are ignored here. Building the model reports them.
        with suppress(RecipeError):
            return recipe.replace(**preset)
        preset = {}
    zoo = timm_zoo if recipe.model.name.startswith(TIMM) else torchvision_zoo
    mean, std, size = zoo.read_preset(recipe.model)
    if recipe.data.image_size is None and size:
        preset["data__image_size"] = size
    # If the number of channels is not 1 or 3, mean and deviation will be measured.
    has_preset = mean and recipe.data.channels in (None, 1, 3)
    if has_preset and recipe.data.mean is None and recipe.data.std is None:
        preset |= {"data__mean": mean, "data__std": std}
    return recipe.replace(**preset) if preset else recipe


def _read_stored(source: str) -> dict[str, Any]:
    """Read keys of `data` from the metadata of weights.

    The result is empty if the metadata cannot be read, or if the data were not images.
    """
    stored = {}
    try:
        metadata = read_metadata(find_run(source))
        for key in ("image_size", "channels", "mean", "std"):
            stored[key] = json.loads(metadata[key])
    except (CheckpointError, KeyError, ValueError, RecursionError):
        # No error is raised here, because building the model reports what is wrong with the file.
        return {}
    return stored if stored["mean"] else {}

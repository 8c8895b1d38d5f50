"""The preprocessing of the starting weights: image size, channels, mean and standard deviation."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from trainer.errors import CheckpointError, RecipeError
from trainer.models import timm_zoo, torchvision_zoo
from trainer.models.zoo import form
from trainer.recipe import Recipe
from trainer.recipe.known_names import OWN_PHOTOS, TIMM
from trainer.saving.run_names import run_named
from trainer.saving.weights import read_metadata


def with_pretrained_input(recipe: Recipe) -> Recipe:
    """A recipe with the preprocessing of its starting weights. On photos, where it says nothing else, that of a run
    (model.init_from), of torchvision's weights, or of a model of timm.

    Raises:
        RecipeError: weights that are not published, or timm is needed and not installed.
    """
    if (weights := form(recipe.model)) != recipe.model.weights:
        recipe = recipe.replace(model__weights=weights)
    if recipe.data.name not in OWN_PHOTOS:
        return recipe
    if recipe.model.init_from is not None and (stored := _stored(recipe.model.init_from)):
        if (recipe.data.channels or 3) not in (1, 3, stored["channels"]):  # they are measured
            del stored["mean"], stored["std"]
        words = {f"data__{key}": value for key, value in stored.items() if getattr(recipe.data, key) is None}
        with suppress(RecipeError):  # of a damaged file, which is reported when the model is built
            return recipe.replace(**words)
    mean, std, size = (timm_zoo if recipe.model.name.startswith(TIMM) else torchvision_zoo).preset(recipe.model)
    mean = mean if recipe.data.channels in (None, 1, 3) else None  # else it is measured
    words = {"data__image_size": size} if recipe.data.image_size is None and size else {}
    words |= (
        {"data__mean": mean, "data__std": std} if mean and recipe.data.mean is None and recipe.data.std is None else {}
    )
    return recipe.replace(**words) if words else recipe


def _stored(source: str) -> dict[str, Any]:
    """Keys of `data` in the metadata of a run's weights; empty where there are none, or inputs are not images."""
    try:
        metadata = read_metadata(run_named(source))
        keys = {key: json.loads(metadata[key]) for key in ("image_size", "channels", "mean", "std")}
    except (CheckpointError, KeyError, ValueError, RecursionError):
        return {}  # building the model reports what is wrong with them
    return keys if keys["mean"] else {}

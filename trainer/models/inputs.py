"""What starting weights were trained on: images of a size and of so many channels, with a mean and a deviation."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from trainer.errors import CheckpointError, RecipeError
from trainer.models import timm_zoo
from trainer.recipe import Recipe
from trainer.recipe.known_names import OWN_PHOTOS
from trainer.saving.run_names import run_named
from trainer.saving.weights import read_metadata


def with_own_input(recipe: Recipe) -> Recipe:
    """A recipe that trains on photos, prepared as those that its starting weights were trained on, where it says
    nothing else: those of a run (model.init_from) tell how, and so do models of timm.

    Raises:
        RecipeError: timm is needed and not installed.
    """
    if recipe.data.name not in OWN_PHOTOS:
        return recipe
    if recipe.model.init_from is not None and (told := _told(recipe.model.init_from)):
        words = {f"data__{key}": value for key, value in told.items() if getattr(recipe.data, key) is None}
        with suppress(RecipeError):  # what a damaged file tells; what is wrong with it is said when it is read
            return recipe.replace(**words)
    return timm_zoo.with_own_input(recipe)


def _told(source: str) -> dict[str, Any]:
    """Keys of `data` by what a run's weights tell of its images; empty where they tell nothing, or of no images."""
    try:
        facts = read_metadata(run_named(source))
        found = {key: json.loads(facts[key]) for key in ("image_size", "channels", "mean", "std")}
    except (CheckpointError, KeyError, ValueError, RecursionError):
        return {}  # building the model says what is wrong with them
    return found if found["mean"] else {}

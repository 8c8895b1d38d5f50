"""Measuring speed where the data is missing: the recipe's model, global batch and image size on synthetic images."""

from __future__ import annotations

from collections.abc import Callable

from trainer.data import Datasets
from trainer.recipe import Recipe

STEPS = 20
PLAIN = {"crop": "none", "auto": "none", "hflip": 0.0, "alternate": False, "erase": 0.0}  # no image is decoded either


def speed_recipe(recipe: Recipe, data: Datasets, say: Callable[[str], None]) -> Recipe:
    """The recipe, cut to at most 20 steps; the maths of a step stays, but for augmentation."""
    steps = min(STEPS, recipe.max_steps or STEPS)
    say(
        f"NO DATA: data.root is not set, so this measures SPEED on SYNTHETIC images and trains nothing of use.\n"
        f"  {recipe.model.name}, global batch {recipe.batch_size}, {data.image_size} px; {steps} steps (max_steps=N: "
        "fewer); no augmentation, no checkpoint. To train: data.root=/path/to/images"
    )
    plain = {f"augment__{key}": value for key, value in PLAIN.items()}
    return recipe.replace(**plain, max_steps=steps, resume=None)

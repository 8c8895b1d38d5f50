"""Measuring speed where the data is missing: the recipe's model, global batch and image size on synthetic images."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from trainer.data import Datasets
from trainer.models.memory import COPIES, room_in, size_of
from trainer.processes.world import World
from trainer.recipe import Recipe
from trainer.recipe.checks import most_rows
from trainer.telemetry.device_memory import free_memory
from trainer.telemetry.readable import as_size
from trainer.training.memory_needs import bytes_of_sample, pieces_that_fit

STEPS, SECONDS = 20, 120.0


def speed_recipe(recipe: Recipe, model: nn.Module, data: Datasets, world: World, say: Callable[[str], None]) -> Recipe:
    """The recipe, cut to at most 20 steps, and accumulating in smaller pieces where memory is short.

    Rank 0 decides for all. The global batch, and so the maths of a step, stays; images are not augmented, since none is
    decoded either.
    """
    rows = most_rows(recipe, world.size, 1)
    per_image = bytes_of_sample(model, recipe, (data.channels, data.image_size, data.image_size))
    room = room_in(free_memory(world.device), world.sharing(), COPIES * size_of(*model.parameters()))
    fitting = pieces_that_fit(recipe, world.size, recipe.accumulate, per_image, room)
    pieces = world.broadcast_object(fitting or recipe.accumulate)
    say(
        f"NO DATA: data.root is not set, so this measures SPEED on SYNTHETIC images and trains nothing of use.\n"
        f"  {recipe.model.name}, global batch {recipe.batch_size}, {data.image_size} px; at most {STEPS} steps "
        f"or {SECONDS:.0f} s; no augmentation, no checkpoint. To train: data.root=/path/to/images"
    )
    if pieces != recipe.accumulate:
        say(
            f"  memory: {world.size} x {rows} images "
            f"need {as_size(per_image * rows * world.size)} of activations; "
            f"accumulating {pieces} pieces of {most_rows(recipe, world.size, pieces)} instead (accumulate={pieces})"
        )
    plain = {"crop": "none", "auto": "none", "hflip": 0.0, "alternate": False, "erase": 0.0}
    recipe = recipe.replace(**{f"augment__{key}": value for key, value in plain.items()})
    return recipe.replace(accumulate=pieces, max_steps=min(STEPS, recipe.max_steps or STEPS), resume=None)

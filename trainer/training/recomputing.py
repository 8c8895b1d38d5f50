"""`recompute=auto`: of how many first blocks a GPU's memory asks that activations are computed anew."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.data import Example
from trainer.devices.precision import AUTOCAST
from trainer.models import memory
from trainer.models.recompute import recompute, runs_of
from trainer.models.shapes import without_values
from trainer.modes.fsdp_units import teacher_share, unit_sizes, units_of
from trainer.recipe import Recipe
from trainer.recipe.checks import check_processes, most_rows, weight_shards
from trainer.telemetry.device_memory import free_memory
from trainer.training.state import Resolved


def settled(resolved: Resolved, model: nn.Module) -> Resolved:
    """The run with `recompute=auto` decided: of no block on the CPU. Collective.

    Raises:
        RecipeError: there are some, and the recipe has what does not go with that.
    """
    recipe, world, count = resolved.recipe, resolved.world, 0
    if recipe.recompute != "auto":
        return resolved
    if world.device.type == "cuda":
        weights, held = memory.size_of(*model.parameters()), 0
        if resolved.teacher and recipe.traits.exchanges == "shards":  # else it is on the device already
            held = teacher_share(resolved.teacher.size, weights, weight_shards(recipe, world.size))
        room = memory.room_in(free_memory(world.device), world.sharing(), held)
        example = resolved.datasets.example(most_rows(recipe, resolved.share.count))
        count = blocks_needed(model, recipe, example, room, world.size)
    count = int(world.max_(torch.tensor(count)).item())
    recipe = recipe.replace(recompute=count > 0)
    check_processes(recipe, world.size)
    return replace(resolved, recipe=recipe, recomputed=count)


def blocks_needed(model: nn.Module, recipe: Recipe, example: Example, room: float, processes: int) -> int:
    """The fewest first blocks with which a step takes at most `room` bytes, else all; none where shapes do not tell."""
    parts, runs = weight_shards(recipe, processes), runs_of(model)

    def fits(count: int) -> bool:
        copy, precision = without_values(model).train(), AUTOCAST.get(recipe.precision)
        recompute(copy, runs[:count], random=False)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", precision, enabled=bool(precision)):
            copy._apply(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype))  # type: ignore[no-untyped-call]
            inputs = example.zeros(torch.device("cpu"), channels_last=recipe.channels_last).inputs
            needed: float = memory.of_module(copy, copy, inputs).peak + memory.size_of(inputs)
        weights = memory.size_of(*copy.parameters())
        if parts > 1:  # what ranks gather of each other's
            rest, *units = unit_sizes(copy, units_of(copy))
            needed += min(weights, rest + 3 * max(units, default=0))
        return needed + weights * (memory.COPIES + (recipe.ema is not None)) / parts <= room

    try:
        return memory.fewest(len(runs), fits)
    except (RuntimeError, NotImplementedError, AssertionError, ValueError, TypeError, LookupError):
        return 0

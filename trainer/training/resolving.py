"""What a run is to do, settled before anything is built: its folder, its recipe, its data and its devices.

Two of the four steps of `wiring.prepare`: `claim` the run folder, `resolve` all that the recipe leaves open.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from trainer import modes, tasks
from trainer.data import Datasets, open_datasets, steps_per_epoch
from trainer.data.cache import cached
from trainer.data.feeds import known_labels
from trainer.data.folders.splits import NOTHING_BEFORE, Before, continued
from trainer.devices.precision import set_precision
from trainer.errors import TrainerError
from trainer.models.inputs import with_pretrained_input
from trainer.processes import stacks
from trainer.processes.allocation import keep_freed_memory
from trainer.processes.resources import locate
from trainer.processes.world import PATIENCE, World
from trainer.recipe import Recipe, flatten
from trainer.saving.run_folder import RunFolder
from trainer.tasks import Task
from trainer.telemetry.tracking import NullTracker, Tracker
from trainer.training import resuming
from trainer.training.callbacks import Callbacks
from trainer.training.initial_model import model_of
from trainer.training.randomness import seed_everything
from trainer.training.run import Resolved
from trainer.training.same_images import check_same_images, identified
from trainer.training.speed_test import speed_recipe


@dataclass(frozen=True)
class Claim:
    """A run folder, held by rank 0 for all ranks, which have met.

    Attributes:
        settled: keys of the recipe that the run to be continued chose, where this recipe leaves them open.
        before: the images that it holds out.
    """

    world: World
    tracker: NullTracker
    settled: dict[str, Any]
    before: Before


def claim(recipe: Recipe, callbacks: Callbacks, closing: ExitStack) -> Claim:
    """Meet the other ranks and hold the run folder until `closing` is closed. Collective.

    The folder is held when all have met: a run that waits for its ranks keeps no other out. Where rank 0 cannot have
    it, every rank raises the same.
    """
    world = locate(recipe)
    world.connect(recipe.timeout)
    tracker, before, refused = NullTracker(), NOTHING_BEFORE, None
    if world.is_main:
        try:
            folder = RunFolder(recipe)
            tracker = Tracker(recipe, folder)
            closing.callback(tracker.close)
            before = continued(folder)
        except TrainerError as error:
            refused = error
    refused, path, settled, before = world.broadcast_object((refused, tracker.path, tracker.folder.settled, before))
    if refused is not None:
        raise refused
    stacks.write_to(path)
    closing.callback(callbacks.close)
    callbacks.connect(world)
    return Claim(world, tracker, settled, before)


def resolve(typed: Recipe, claim: Claim, closing: ExitStack) -> Resolved:
    """Look once at the folder, the data and the machine, and settle what the recipe leaves open. Collective."""
    world, tracker = claim.world, claim.tracker
    recipe = typed.replace(**claim.settled)
    reasons = _changes(typed, recipe, "as the run that is continued")
    before, recipe = recipe, with_pretrained_input(recipe)
    reasons |= _changes(before, recipe, "as the weights that it starts from were trained")
    data = world.all_or_none(lambda: open_datasets(recipe, claim.before), PATIENCE)
    if "images" in data.notes:
        before, recipe = recipe, recipe.replace(data__image_size=data.image_size, data__channels=data.channels)
        reasons |= _changes(before, recipe, "by a look at the images")
    task = task_of(recipe, data)
    shard = modes.data_shard(recipe, world)
    steps = steps_per_epoch(len(data.train), recipe, shard)
    check_same_images(world, data)
    state = resuming.newest(tracker, world, recipe)
    samples, resized = identified(world, data, state)
    before, (data, recipe) = recipe, cached(replace(data, sources=()), recipe, world, tracker.say, closing)
    reasons |= _changes(before, recipe, "by the room on the disk")
    speed_only = data.synthetic and recipe.data.name != "synthetic"
    if speed_only:
        with torch.random.fork_rng(devices=[]):
            model = model_of(recipe, task, data)
        before, recipe = recipe, speed_recipe(recipe, model, data, world, tracker.say)
        reasons |= _changes(before, recipe, "there is no data: this measures speed")
    tracker.settle(recipe)
    return Resolved(recipe, reasons, data, task, world, shard, steps, tracker, state, samples, resized, speed_only)


def _changes(before: Recipe, after: Recipe, reason: str) -> dict[str, str]:
    was, now = flatten(before.to_dict()), flatten(after.to_dict())
    return dict.fromkeys((key for key in now if was[key] != now[key]), reason)


def start_process(recipe: Recipe) -> None:
    """What a process does before anything that computes."""
    keep_freed_memory()
    seed_everything(recipe.seed, recipe.deterministic, recipe.compile)
    set_precision(recipe.precision)


def task_of(recipe: Recipe, data: Datasets) -> Task:
    """The recipe's task for a data set."""
    return tasks.create(recipe, data.classes, known_labels(data.train, skip=False))

"""One evaluation, used by training and by everything that comes after it: every sample counts exactly once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer import modes
from trainer import recipe as recipes
from trainer.data import Batch, Loader, open_datasets
from trainer.devices.precision import set_precision
from trainer.errors import CheckpointError
from trainer.models.zoo import build, initialise
from trainer.modes import Strategy
from trainer.processes.world import World, keep_freed_memory, locate
from trainer.recipe import Recipe
from trainer.recipe.checks import check_processes
from trainer.saving.weights import read_weights
from trainer.telemetry.metrics import Sums
from trainer.training.randomness import seed_everything


def evaluate(
    strategy: Strategy,
    batches: Iterator[Batch],
    world: World,
    boundary: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Loss and accuracy of the model as it stands.

    Args:
        strategy: its weights already settled.
        batches: this rank's share of the held-out set, full-shape batches of which `count` rows are real.
        world: sums are added over its ranks, once.
        boundary: called after every batch with the number done.

    Returns:
        val_loss (mean cross-entropy, without label smoothing), val_top1, val_top5 (fractions), val_samples.
    """
    strategy.train(False)
    sums = Sums.zero(world.device)
    for done, batch in enumerate(batches, 1):
        outputs = strategy.forward(batch.inputs)
        if outputs is not None:
            sums.add(outputs, batch.targets, batch.count)
        boundary(done)
    loss, correct1, correct5, count = world.sum_(sums.as_tensor()).tolist()
    total = max(1.0, count)
    return {
        "val_loss": loss / total if count else torch.nan,
        "val_top1": correct1 / total,
        "val_top5": correct5 / total,
        "val_samples": int(count),
    }


def evaluate_run(checkpoint: str, *words: str) -> dict[str, Any]:
    """Evaluate a trained run again, in this process or as one of torchrun's ranks.

    Args:
        checkpoint: a run folder (its last weights), one of its checkpoints, or a .safetensors file of it.
        words: `key=value` on top of the run's own recipe: where the data is, another batch size, devices.

    Returns:
        What `evaluate` returns, on every rank.

    Raises:
        CheckpointError: no such checkpoint, or no recipe with it.
    """
    keep_freed_memory()
    path = Path(checkpoint).expanduser()
    weights, metadata = read_weights(path)
    recipe = recipe_of(path, metadata, words)
    seed_everything(recipe.seed, recipe.deterministic)
    set_precision(recipe.precision)
    world = locate(recipe)
    rows = -(-recipe.batch_size // world.size)  # padding makes any number of images fit
    recipe = recipe.replace(
        mode="single" if world.size == 1 else "ddp", batch_size=rows * world.size, accumulate=1, augment={}
    )
    check_processes(recipe, world.size)
    data = open_datasets(recipe)
    try:
        known = tuple(map(str, json.loads(metadata.get("classes", "null")) or data.classes))
    except (ValueError, TypeError, RecursionError):
        raise CheckpointError(f"{path}: what it tells of its classes makes no sense") from None
    if known != data.classes:
        raise CheckpointError(f"{path} was trained on {_listed(known)}, and {data.split} holds {_listed(data.classes)}")
    model = build(recipe.model, len(data.classes), data.channels, data.image_size, starting=False)
    initialise(model, weights, str(path), whole=True)
    world.connect(recipe.timeout)
    strategy = modes.create(recipe, world)
    shard = strategy.shard()
    strategy.setup(model, (rows, data.channels, data.image_size, data.image_size))
    loader = Loader(data, recipe, shard, world.device, world.place.local_size)
    found = evaluate(strategy, loader.evaluation(), world)
    loader.close()
    if world.is_main:
        print(f"{path}: {described(found)} on {found['val_samples']:,} held-out images of {data.name}", flush=True)
    world.barrier()
    world.close()
    return found


def _listed(classes: tuple[str, ...]) -> str:
    return f"{len(classes)} classes ({', '.join(classes[:8])}{', ...' * (len(classes) > 8)})"


def described(found: Mapping[str, Any]) -> str:
    """Loss and accuracies in words."""
    return f"val loss {found['val_loss']:.4f}  top-1 {found['val_top1']:.2%}  top-5 {found['val_top5']:.2%}"


def recipe_of(path: Path, metadata: Mapping[str, str], words: tuple[str, ...]) -> Recipe:
    """The recipe that weights were trained with: from their file, else from the run folder they lie in.

    Its devices were those of the training; evaluation takes what is here, or what the words say.
    """
    anywhere = {"devices": "auto", "mode": "ddp"}
    if "recipe" in metadata:
        try:
            written = recipes.load(dict(json.loads(metadata["recipe"])))
        except (ValueError, TypeError, RecursionError) as error:  # a RecipeError too
            raise CheckpointError(f"{path} holds a recipe that cannot be used ({error})") from None
        return recipes.load({**written.to_dict(), **anywhere}, *words)
    for folder in (path, *path.absolute().parents[:3]):
        if (folder / "recipe.yaml").is_file():
            return recipes.load({**recipes.load(str(folder / "recipe.yaml")).to_dict(), **anywhere}, *words)
    raise CheckpointError(f"{path} has no recipe with it; give a run folder, as in checkpoint=runs/x")

"""A trained run, evaluated again: from its files alone, on other data or other devices."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer import modes
from trainer.data import Loader
from trainer.errors import RecipeError
from trainer.models.zoo import fitted
from trainer.modes import Context
from trainer.processes.resources import locate
from trainer.processes.terminal import say
from trainer.processes.world import DATA_PATIENCE
from trainer.recipe.checks import check_processes
from trainer.recipe.recipe_files import split_words, word_of
from trainer.saving.run_names import run_named
from trainer.saving.tensor_files import whole
from trainer.training.evaluation import evaluate, metrics_of, replayed
from trainer.training.initial_model import model_of
from trainer.training.same_images import check_same_images
from trainer.training.setup import start_process, task_of
from trainer.training.trained import Trained


def evaluate_run(checkpoint: str | Path, *words: str) -> dict[str, float]:
    """Evaluate a trained run again, in this process or as one of torchrun's ranks.

    Args:
        checkpoint: a run folder (its last weights) or its name below runs, one of its checkpoints, or a .safetensors
            file of it.
        words: `key=value` on top of the run's own recipe: where the data is, another batch size, devices; and
            split=test for the images of a test part, which no run looks at where there is a val part too.

    Returns:
        What `evaluate` returns, on every rank; of split=test as test_loss and so on.

    Raises:
        RecipeError: it is no path, or the words mean nothing.
        CheckpointError: no such checkpoint, or no recipe with it.
    """
    if not isinstance(checkpoint, str | Path):
        raise RecipeError(f"evaluate() takes a run's path, as in evaluate('runs/x'), not {type(checkpoint).__name__}")
    options, settings = split_words(words, ("split",))
    part = options.get("split", "val")
    if part not in ("val", "test"):
        raise RecipeError(f"split={part[:40]}: evaluate takes split=val (the default) or split=test")
    if any(word.startswith("output=") for word in settings):
        raise RecipeError(
            "output= is not for evaluate, which writes no file; it takes data. keys, split=, batch_size=, devices=, "
            "threads= and precision="
        )
    trained = Trained.read(run_named(str(checkpoint)), settings)
    path, recipe = str(trained.path), trained.recipe
    start_process(recipe)
    world = locate(recipe)
    if recipe.shares == "auto" or (recipe.shares is not None and world.size == 1):
        raise RecipeError(
            f"{word_of('shares', recipe.shares)}: evaluate divides images among torchrun's processes by numbers, as in "
            "shares=[3,1]; type shares=null"
        )
    rows = -(-recipe.batch_size // world.size)  # padding makes any number of images fit
    augment = {"crop": recipe.augment.crop}  # tells whether photos are read as they are needed
    plain = {"accumulate": 1, "recompute": False, "augment": augment}
    recipe = recipe.replace(mode="single" if world.size == 1 else "ddp", batch_size=rows * world.size, **plain)
    check_processes(recipe, world.size)
    world.connect(recipe.timeout)
    data = world.all_or_none(lambda: trained.data(recipe, part == "test"), DATA_PATIENCE)
    check_same_images(world, data)
    task = task_of(recipe, data)
    model = model_of(recipe, task, data, starting=False)
    weights = fitted(model, trained.weights, path, whole=True)
    strategy = modes.create(Context(recipe, world, task, data.example(rows)))
    strategy.setup(model)
    strategy.scatter(whole(weights), {**strategy.named_parameters(), **strategy.named_buffers()})
    loader = Loader(data, recipe, task, strategy.share, world.device, world.place.local_size)
    forward = replayed(strategy, lambda line: say(line) if world.is_main else None)
    forward.begin(len(loader.evaluation_spans))
    metrics = evaluate(strategy, loader.evaluation(), world, forward=forward)
    forward.close()
    skipped = int(world.sum_(torch.tensor([float(loader.skipped)])).item())
    loader.close()
    if world.is_main:
        images = f"{metrics['val_samples']:,} {'test' if part == 'test' else 'held-out'} images of {data.name}"
        images += f"; {skipped:,} more cannot be read" if skipped else ""
        say(f"{path}: {part} {task.text(metrics_of(metrics))} on {images}")
    world.barrier()
    world.close()
    return {f"{part}_{key.removeprefix('val_')}": value for key, value in metrics.items()}

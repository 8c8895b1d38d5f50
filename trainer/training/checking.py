"""Runs with `check=true`: a few steps that try everything a long run does, and keep nothing.

The run trains, evaluates and saves as usual, in a temporary folder. Then it is built again from its
checkpoint. Both the saved and the restored state are compared with the checkpoint.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainer.errors import CheckpointError
from trainer.memory.device import release_garbage
from trainer.recipe import Recipe
from trainer.recipe.text import list_some
from trainer.saving import checkpoint
from trainer.saving.files import measure_size
from trainer.saving.steps_file import read_steps
from trainer.saving.tensor_files import wrap_tensors
from trainer.telemetry.readable import format_size
from trainer.training.evaluation import strip_prefix
from trainer.training.parts import PARTS
from trainer.training.resuming import on_every_rank, restore
from trainer.training.run import Run
from trainer.training.setup import build, start_process

STEPS = 2


def shorten_recipe(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe of a check: a few steps of `recipe` in `folder`, without loggers."""
    steps = STEPS
    if recipe.graphs is not False and torch.cuda.is_available():
        from trainer.training import step_graphs, step_tuning

        # Only after this number of steps is a step captured as a CUDA graph and replayed.
        steps += step_graphs.WARMUP_STEPS + step_tuning.TIMED_STEPS
    # Periodic evaluations and checkpoints occur at least once.
    every = steps // 2
    return recipe.replace(
        output=str(folder),
        resume=None,
        max_steps=min(steps, recipe.max_steps or steps),
        max_time=None,
        evaluate__every_steps=recipe.evaluate.every_steps and every,
        save__every_steps=recipe.save.every_steps and every,
        # Building the cache would decode the whole data set.
        data__cache="off",
        logging__every_steps=1,
        logging__tensorboard=False,
        logging__wandb=None,
        logging__mlflow=None,
        logging__verdict=False,
    )


def describe(run: Run) -> dict[str, str]:
    """Return lines about the training of a check, by title. Only rank 0 returns any."""
    folder = run.tracker.path
    if folder is None:
        return {}
    files = [*filter(None, [run.recipe.data.labels])]
    if where := getattr(run.datasets.train, "where", None):
        # The index of a repeated sample is that of its image plus a multiple of the set's length.
        rows = run.loader.indices(0)[0] % len(run.datasets.train)
        files += map(where, rows.tolist())
    losses = [float(row["train_loss"]) for row in read_steps(folder / "steps.csv")[0]]
    history = run.state.history
    metrics = run.task.text(strip_prefix(history.validation))
    memory = [f"{name} {format_size(size)}" for name, size in run.observer.memory.items()]
    return {
        "check": f"passed: {run.recipe.name}, mode={run.recipe.mode}; the run was not kept",
        "read": list_some(files) or f"{run.datasets.name}, which is in memory",
        "trained": f"{len(losses)} steps, loss {', '.join(f'{loss:.4f}' for loss in losses)}",
        "evaluated": f"{history.validation.get('val_samples', 0)} held-out images: {metrics}",
        "memory": f"at most {', '.join(memory)}",
    }


def reopen(run: Run) -> tuple[Callable[[], Run], dict[str, str]]:
    """Close a run that has saved, and prepare to build it again from its checkpoint. Collective.

    Returns:
        `(build_again, lines)`: a function that returns the restored run, and on rank 0 a line about
        the checkpoint, by title. The function holds no reference to `run`, so that the first model
        can be freed before the second one is built.

    Raises:
        CheckpointError: the checkpoint differs from the state of the run.
    """
    path = run.tracker.path or Path()
    loaded = run.world.on_main(lambda: checkpoint.load_newest(path, run.tracker.say))
    saved = on_every_rank(loaded, run.world)
    assert saved
    lines = {}
    if loaded:
        size = format_size(measure_size(loaded.path))
        lines["saved"] = f"{size}, loaded and compared: {', '.join(saved.shards)}, history"
    _compare(run, saved)
    resolved = replace(run.resolved, checkpoint=saved, tuned=run.strategy.tuned)
    interrupts = run.interrupts
    interrupts.nothing_new = lambda: False
    callbacks = run.callbacks
    ledger = run.ledger
    run.close()

    def build_again() -> Run:
        release_garbage()
        # Seed again, so that all ranks initialize the same model, as in new processes.
        start_process(resolved.recipe)
        restored = build(resolved, interrupts, callbacks, ledger)
        restore(resolved, restored.state, saved)
        _compare(restored, saved)
        return restored

    return build_again, lines


def _compare(run: Run, saved: checkpoint.State) -> None:
    """Raise CheckpointError on all ranks if any rank differs from a checkpoint. Collective."""
    error = None
    if difference := find_difference(run, saved):
        error = CheckpointError(
            f"check=true: the checkpoint of step {saved.position.step} differs from the run in "
            f"{difference}, so the run could not be resumed"
        )
    run.world.raise_any(error)


def find_difference(run: Run, saved: checkpoint.State) -> str | None:
    """Return the name of the first part in which this rank differs from a checkpoint, or None."""
    if run.state.position != saved.position:
        return "position"
    for kind in PARTS:
        part = kind(run.resolved, run.state)
        name = part.name or kind.__name__
        facts = part.facts()
        if _normalize(facts) != _normalize({key: saved.facts.get(key) for key in facts}):
            return name
        # Tensors of parts that differ between ranks are compared as tensors of `RankState`.
        if part.name in run.recipe.traits.per_rank_state:
            continue
        tensors = part.tensors()
        shards = wrap_tensors(tensors)
        if part.saved_by == "all":
            shards = run.strategy.layout(tensors)
        stored = saved.part(part.name)
        for key, shard in shards.items():
            if key not in stored or not torch.equal(shard.rows_of(stored[key]), shard.local.cpu()):
                return f"{name} ({key})"
    return None


def _normalize(facts: dict[str, Any]) -> str:
    """Return metadata as JSON that can be compared.

    Integers become floats, keys are sorted, and the seconds of the history, which differ at each
    call, are 0.
    """
    if history := facts.get("history"):
        facts = {**facts, "history": {**history, "seconds": 0}}
    numbers = json.loads(json.dumps(facts), parse_int=float)
    return json.dumps(numbers, sort_keys=True)

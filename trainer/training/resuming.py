"""A run's state to a checkpoint and back. Collective: every rank calls these, rank 0 writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from trainer.errors import CheckpointError, SetupError, TrainerError, is_out_of_memory, text_of
from trainer.optim.optimizers import optimizer_state
from trainer.processes.rank import is_restart
from trainer.processes.world import World
from trainer.recipe import Recipe
from trainer.saving import checkpoint
from trainer.saving.checkpoint_broadcast import on_every_rank
from trainer.telemetry.tracking import NullTracker
from trainer.training.randomness import restore_random_states, seed_ranks
from trainer.training.run import History, Run
from trainer.training.same_images import tell_changes

_HISTORY = TypeAdapter(History)
_SENSELESS = (
    "the checkpoint of step {step} is intact but lacks what this version needs to continue ({reason}); "
    "start anew in another folder (output=...), or from its weights: model.init_from=<run>/last.safetensors"
)


def newest(tracker: NullTracker, world: World, recipe: Recipe) -> checkpoint.State | None:
    """The newest good checkpoint of a run folder that is being continued; rank 0 finds it and all follow.

    Raises:
        CheckpointError: there are checkpoints and none is good.
        SetupError: another rank has checkpoints in that folder and rank 0 has none; starting over would lose them.
    """
    mine = None
    if tracker.folder.replaced:
        tracker.say(f"{tracker.path}: the run that was here saved nothing; starting over")
    if tracker.folder.resuming and tracker.path is not None:
        mine = checkpoint.newest(tracker.path, tracker.say)
    if mine and not mine.state.part("model"):
        raise CheckpointError(_SENSELESS.format(step=mine.state.position.step, reason="no weights"))
    state = on_every_rank(mine, world)
    if state is None and recipe.output is not None:
        # A rank of a node that joins has no restarts of its own.
        continued = recipe.resume is not None or world.place.restarts > 0 or is_restart()
        here = continued and bool(checkpoint.checkpoints_in(Path(recipe.output).expanduser() / "checkpoints"))
        owner = int(world.max_(torch.tensor(world.rank if here else 0)).item())
        if owner:
            raise SetupError(
                f"rank {owner} finds checkpoints in {recipe.output} where rank 0 has none: make the machine of "
                f"rank {owner} the first (torchrun --node_rank=0), or let all machines share the folder"
            )
    return state


def bound_to(recipe: Recipe, world: World) -> dict[str, Any]:
    """What the random streams of the ranks are bound to: which data a rank computes, and which part of the model."""
    dimensions = {name: size for name, size in world.grid.sizes.items() if name != "replicas"}
    return {"mode": recipe.mode, "world_size": world.size, **dimensions}


def restore(run: Run, state: checkpoint.State) -> None:
    """Continue a checkpoint, whose weights have the names and shapes of the model.

    Raises:
        CheckpointError: its optimizer state or moving average does not fit, or it is whole and yet no run's.
    """
    try:
        _restore(run, state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, TrainerError) or is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {' '.join(text_of(error).split())[:120]}"
        raise CheckpointError(_SENSELESS.format(step=state.position.step, reason=reason)) from error


def _restore(run: Run, state: checkpoint.State) -> None:
    run.strategy.scatter(state.part("model"), run.weights())
    run.strategy.load_extra_state(state.part("extra"))
    try:
        run.strategy.scatter(state.part("optimizer"), optimizer_state(run.optimizer, run.parameters))
    except ValueError as error:
        reason = f"the checkpoint's optimizer state does not fit: {error} in it"
        if not run.recipe.resume_weights_only:
            advice = "resume_weights_only=true continues with its weights and a fresh optimizer"
            raise CheckpointError(f"{reason}; {advice}") from None
        run.tracker.say(f"  only the weights are continued; the optimizer starts from scratch: {reason}")
    _restore_outer(run, state)
    run.updater.load(state.tensors.get("scaler", {}))
    if run.average is not None:
        saved = state.part("ema")
        if not saved:
            raise CheckpointError("the checkpoint holds no moving average; choose another output= to start anew")
        run.strategy.scatter(saved, run.average.average)
    _take_position(run, state)
    tell_changes(run, state)
    history = state.facts["history"]
    # Before there were tasks, the best was a top-1 accuracy by name.
    run.history = _HISTORY.validate_python({**history, "best": history.get("best", history.get("best_top1"))})
    run.updater.skipped.fill_(min(run.recipe.tolerated, len(run.history.nonfinite)))  # the next one is one too many
    run.tracker.say(f"resuming at step {run.position.step} of {run.total_steps}")
    if run.history.lr_factor != 1:
        run.tracker.say(f"  learning rate: {run.history.lr_factor:.3g} times the schedule's, as a callback chose")
    was, now = state.facts["topology"], bound_to(run.recipe, run.world)
    if was != {key: now[key] for key in now if key in was}:  # older ones do not tell of stages
        run.tracker.say(f"  saved as {was}, continued as {now}: random streams (dropout) start anew")
        seed_ranks(run.recipe.seed + run.position.step, run.world.rank)
        _sum_losses(run, state)
        return
    mine = _of_rank(state, run.world.rank)
    fresh = restore_random_states(mine, run.world.drives)
    if fresh:
        names = ", ".join(map(str, fresh))
        run.tracker.say(f"  the checkpoint holds no random state of {names}: random streams (dropout) start anew there")
    with torch.no_grad():
        for name, tensor in private_tensors(run).items():
            if name in mine:  # an optimizer that starts anew has other tensors
                tensor.copy_(mine[name])
    run.unlogged = list(mine["unlogged"].to(run.world.device).unbind())


def _restore_outer(run: Run, state: checkpoint.State) -> None:
    """Continue the mode's own optimizer, whose anchor is the same for any number of workers, or tell that it is not."""
    saved, kept = state.part("outer"), run.strategy.outer_state()
    run.strategy.load_outer_state(saved)
    if kept and not saved:
        run.tracker.say("  local_sgd's outer optimizer starts anew from these weights: the checkpoint holds none")
    if saved and not kept:
        where = f"mode={run.recipe.mode}" if run.world.size > 1 else "one process"
        run.tracker.say(f"  {where} has no outer optimizer: the momentum of local_sgd's averagings is dropped")


def _take_position(run: Run, state: checkpoint.State) -> None:
    """Continue at the checkpoint's step.

    A mode that cuts an epoch into another number of steps (local SGD, Hogwild) takes as large a share of this epoch as
    done; steps go on being counted from the checkpoint's, and the learning rate follows the epochs.
    """
    run.position = state.position
    step, epoch, inside = state.position
    before = state.facts.get("steps_per_epoch", run.steps_per_epoch)
    run.shift = state.facts.get("shift", 0)  # of a run that was continued so before
    if before != run.steps_per_epoch:
        inside = inside * run.steps_per_epoch // before  # below the epoch's end, unless it was there
        run.position = checkpoint.Position(step, epoch, inside)
        run.shift = step - (epoch * run.steps_per_epoch + inside)
    run.total_steps = run.recipe.epochs * run.steps_per_epoch + run.shift
    if run.recipe.max_steps is not None:
        run.total_steps = min(run.total_steps, run.recipe.max_steps)


def private_tensors(run: Run) -> dict[str, Tensor]:
    """What this rank has for itself, under the names that a checkpoint keeps it by."""
    parts: dict[str, Callable[[], Mapping[str, Tensor]]] = {
        "model": run.weights,
        "optimizer": lambda: optimizer_state(run.optimizer, run.parameters),
        "ema": lambda: run.average.tensors() if run.average is not None else {},
        "scaler": run.updater.state,
    }
    return {f"{kind}:{name}": tensor for kind in run.recipe.traits.private for name, tensor in parts[kind]().items()}


def part_of_rank(rank: int) -> str:
    """The part of a checkpoint that holds what a rank has for itself."""
    return f"rank-{rank:05d}"


def _of_rank(state: checkpoint.State, rank: int) -> dict[str, Tensor]:
    """What a rank had for itself; older checkpoints hold it in one part for all."""
    if part_of_rank(rank) in state.tensors:
        return state.tensors[part_of_rank(rank)]
    prefix = f"{rank}/"
    return {key.removeprefix(prefix): value for key, value in state.tensors["ranks"].items() if key.startswith(prefix)}


def _sum_losses(run: Run, state: checkpoint.State) -> None:
    """Losses since the last logged step, saved by other ranks than there are now: rank 0 takes their sum."""
    size = state.facts["topology"]["world_size"]
    total = torch.stack([_of_rank(state, rank)["unlogged"] for rank in range(size)]).sum(0).to(run.world.device)
    run.unlogged = list((total if run.world.is_main else total * 0).unbind())  # a skipped step's is NaN on all ranks

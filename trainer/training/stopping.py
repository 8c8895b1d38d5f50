"""When a run has nothing left to train: its steps are done, or the task's metric has long not become better."""

from __future__ import annotations

import math

from trainer.errors import RecipeError
from trainer.recipe import Recipe
from trainer.tasks import Task
from trainer.telemetry.readable import counted
from trainer.training.state import History, Resolved, TrainState


def is_over(resolved: Resolved, state: TrainState) -> bool:
    """Whether no further epoch is to be trained; asked between epochs."""
    done = state.position.step >= state.total_steps or lost_patience(resolved, state)
    return state.position.step_in_epoch == 0 and done


def may_be_last(recipe: Recipe, state: TrainState, epoch: int) -> bool:
    """Whether the run may be over once this epoch, whose steps are done, is evaluated."""
    patience, best = recipe.stop.patience, best_epoch(state.history) or 0
    done = state.position.step >= state.total_steps or epoch + 1 == recipe.epochs
    return done or (patience is not None and epoch + 1 - best >= patience)


def lost_patience(resolved: Resolved, state: TrainState) -> bool:
    """Whether the last `stop.patience` epochs were all without a better value of the task's metric.

    It follows from the history alone, which checkpoints hold: a run that stopped so and is continued stops again,
    unless `stop.patience` was raised.
    """
    patience = resolved.recipe.stop.patience
    if patience is None or resolved.speed_only:  # a measurement evaluates nothing
        return False
    return state.position.epoch - (best_epoch(state.history) or 0) >= patience


def check_patience(resolved: Resolved, state: TrainState) -> None:
    """Raises RecipeError where a run that is to train longer would stop at once, as it did before."""
    if resolved.longer and lost_patience(resolved, state):
        lost = state.position.epoch - (best_epoch(state.history) or 0)
        raise RecipeError(
            f"stop.patience={resolved.recipe.stop.patience} ended this run, after {counted(lost, 'epoch')} without a "
            f"better {resolved.task.metric}: to train longer, add stop.patience={lost + 1} or more, or null"
        )


def best_epoch(history: History) -> int | None:
    """Which epoch had the best value of the task's metric, from 1; None where it never was a number."""
    best, epoch = history.best, history.best_epoch
    return None if best is None or epoch is None or math.isnan(best) else epoch + 1


def patience_line(patience: int, task: Task, history: History) -> str:
    """What is printed when patience is lost."""
    best, worse = best_epoch(history), f"a number for {task.metric}"
    if best is not None:
        worse = f"a better {task.text({task.metric: history.best})}, which was epoch {best}'s"
    return f"stopped: {counted(patience, 'epoch')} without {worse} (stop.patience={patience})"


def ended_by(resolved: Resolved, state: TrainState) -> str:
    """Why a run that ended well did so, for result.json."""
    if resolved.speed_only:
        return "speed"
    step, limit = state.position.step, resolved.recipe.max_steps
    if step >= resolved.recipe.epochs * resolved.steps_per_epoch + state.step_offset:
        return "epochs"
    if lost_patience(resolved, state) and step < state.total_steps:
        return "stop.patience"
    return "max_steps" if limit is not None and step >= limit else "callback"

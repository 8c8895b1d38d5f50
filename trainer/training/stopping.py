"""Conditions that end a run: its last step, or no better metric for `stop.patience` epochs.

With `schedule.name=plateau`, epochs without a better metric also lower the learning rate.
"""

import math

from trainer.errors import RecipeError
from trainer.recipe import Recipe
from trainer.recipe.schedule_table import LR_SCHEDULES
from trainer.tasks import Task
from trainer.telemetry.readable import format_count
from trainer.training.state import History, Resolved, TrainState


def is_over(resolved: Resolved, state: TrainState) -> bool:
    """Return whether the run ends before the next epoch."""
    is_done = state.position.step >= state.total_steps or has_lost_patience(resolved, state)
    return state.position.step_in_epoch == 0 and is_done


def may_be_last(recipe: Recipe, state: TrainState, epoch: int) -> bool:
    """Return whether the run may end after the evaluation of `epoch`."""
    patience = recipe.stop.patience
    best = find_best_epoch(state.history)
    is_done = state.position.step >= state.total_steps or epoch + 1 == recipe.epochs
    return is_done or (patience is not None and epoch + 1 - best >= patience)


def has_lost_patience(resolved: Resolved, state: TrainState) -> bool:
    """Return whether the last `stop.patience` epochs did not improve the task's metric.

    The result depends only on the history, which checkpoints contain. So a run that stopped for
    this reason stops again when it is resumed, unless `stop.patience` was raised.
    """
    patience = resolved.recipe.stop.patience
    # A speed measurement evaluates nothing, so there is no metric that could improve.
    if patience is None or resolved.speed_only:
        return False
    return state.position.epoch - find_best_epoch(state.history) >= patience


def check_patience(resolved: Resolved, state: TrainState) -> None:
    """Raise RecipeError if a run that should train longer would stop again immediately."""
    if resolved.longer and has_lost_patience(resolved, state):
        epochs = state.position.epoch - find_best_epoch(state.history)
        raise RecipeError(
            f"stop.patience={resolved.recipe.stop.patience} ended this run, after "
            f"{format_count(epochs, 'epoch')} without a better {resolved.task.metric}: to train "
            f"longer, add stop.patience={epochs + 1} or more, or null"
        )


def lower_rate(recipe: Recipe, history: History, epoch: int) -> str | None:
    """Lower the learning rate if the schedule is `plateau` and the metric has stopped improving.

    The rate changes as with torch's `ReduceLROnPlateau` and threshold=0: after more than
    `schedule.patience` epochs that were not the best so far, counted again after each change. All
    ranks have the same history, so their rates are the same.

    Args:
        recipe: the recipe.
        history: its factor of the learning rate is changed.
        epoch: the epoch that was evaluated, counted from 0.

    Returns:
        A line for the user if the rate was lowered, or else None.
    """
    schedule = recipe.schedule
    if not LR_SCHEDULES[schedule.name].waits:
        return None
    # Numbers of the last better epoch and of the last change, counted from 1; 0 before them.
    best = find_best_epoch(history)
    lowered = 0
    if history.lowered_epoch is not None:
        lowered = history.lowered_epoch + 1
    waited = epoch + 1 - max(best, lowered)
    if waited <= schedule.patience:
        return None
    before = history.lr_factor
    history.lr_factor = min(before, max(before * schedule.gamma, schedule.min_lr / recipe.peak_lr))
    history.lowered_epoch = epoch
    if history.lr_factor == before:
        return None
    return (
        f"learning rate {recipe.peak_lr * history.lr_factor:g}: {format_count(waited, 'epoch')} "
        f"without a better metric (schedule.patience={schedule.patience})"
    )


def find_best_epoch(history: History) -> int:
    """Return the number of the epoch with the best value of the task's metric, counted from 1.

    Return 0 if there is no such epoch: none was evaluated, or the metric was always NaN.
    """
    best = history.best
    epoch = history.best_epoch
    if best is None or epoch is None or math.isnan(best):
        return 0
    return epoch + 1


def format_patience(patience: int, task: Task, history: History) -> str:
    """Return the line that is printed when patience is exhausted."""
    epoch = find_best_epoch(history)
    missing = f"a number for {task.metric}"
    if epoch:
        missing = f"a better {task.text({task.metric: history.best})}, which was epoch {epoch}'s"
    return (
        f"stopped: {format_count(patience, 'epoch')} without {missing} (stop.patience={patience})"
    )


def describe_end(resolved: Resolved, state: TrainState) -> str:
    """Return the reason why a completed run ended: the value of `ended_by` in result.json."""
    if resolved.speed_only:
        return "speed"
    if state.out_of_time:
        return "max_time"
    step = state.position.step
    limit = resolved.recipe.max_steps
    if step >= resolved.recipe.epochs * resolved.steps_per_epoch + state.step_offset:
        return "epochs"
    if has_lost_patience(resolved, state) and step < state.total_steps:
        return "stop.patience"
    if limit is not None and step >= limit:
        return "max_steps"
    return "callback"

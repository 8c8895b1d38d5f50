"""When a run has nothing left to train: its steps are done, or the task's metric has long not become better."""

from __future__ import annotations

import math

from trainer.training.run import Run


def is_over(run: Run) -> bool:
    """Whether no further epoch is to be trained; asked between epochs."""
    return run.position.step_in_epoch == 0 and (run.position.step >= run.total_steps or lost_patience(run))


def may_be_last(run: Run, epoch: int) -> bool:
    """Whether the run may be over once this epoch, whose steps are done, is evaluated."""
    patience, best = run.recipe.stop.patience, best_epoch(run) or 0
    done = run.position.step >= run.total_steps or epoch + 1 == run.recipe.epochs
    return done or (patience is not None and epoch + 1 - best >= patience)


def lost_patience(run: Run) -> bool:
    """Whether the last `stop.patience` epochs were all without a better value of the task's metric.

    It follows from the history alone, which checkpoints hold: a run that stopped so and is continued stops again,
    unless `stop.patience` was raised.
    """
    patience = run.recipe.stop.patience
    if patience is None or run.speed_only:  # a measurement evaluates nothing
        return False
    return run.position.epoch - (best_epoch(run) or 0) >= patience


def best_epoch(run: Run) -> int | None:
    """Which epoch had the best value of the task's metric, from 1; None where it never was a number."""
    best, epoch = run.history.best, run.history.best_epoch
    return None if best is None or epoch is None or math.isnan(best) else epoch + 1


def patience_line(run: Run) -> str:
    """The line that is printed when patience is lost."""
    patience, best = run.recipe.stop.patience, best_epoch(run)
    epochs = f"{patience} epoch{'s' * (patience != 1)}"
    if best is None:
        return f"stopped: {run.task.metric} was not a number in {epochs} (stop.patience={patience})"
    best_value = run.task.text({run.task.metric: run.history.best})
    return f"stopped: {epochs} without a better {best_value}, which was epoch {best}'s (stop.patience={patience})"


def ended_by(run: Run) -> str:
    """Why a run that ended well did so, for result.json."""
    if run.speed_only:
        return "speed"
    if run.position.step >= run.recipe.epochs * run.steps_per_epoch + run.shift:
        return "epochs"
    if lost_patience(run) and run.position.step < run.total_steps:
        return "stop.patience"
    limit = run.recipe.max_steps
    return "max_steps" if limit is not None and run.position.step >= limit else "callback"

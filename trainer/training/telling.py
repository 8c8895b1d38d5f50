"""What the calling program is told of a run as it trains, and whether it wants the run to go on."""

from __future__ import annotations

from trainer.training.callbacks import EpochReport, StepReport
from trainer.training.evaluation import metrics_of
from trainer.training.reporting import pace
from trainer.training.run import Run


def told_epoch(run: Run, epoch: int, best: bool) -> bool:
    """Tell the calling program of an epoch; whether training goes on. Collective."""
    history = run.history
    report = EpochReport(
        epoch=epoch + 1,
        epochs=run.recipe.epochs,
        step=run.position.step,
        train_loss=history.losses[-1],
        metrics=metrics_of(history.validation),
        best=best,
        seconds=run.seconds(),
    )
    return run.callbacks.epoch(run.world, report)


def told_step(run: Run, loss: float, lr: float, window: tuple[int, float, float]) -> bool:
    """Tell the calling program of a logged step; whether training goes on. Collective.

    Args:
        loss, window: see `reporting.step_values`.
    """
    if not run.callbacks.tells("on_step"):
        return True
    report = StepReport(
        step=run.position.step,
        total_steps=run.total_steps,
        epoch=run.position.epoch + 1,
        loss=loss,
        lr=lr,
        samples_per_sec=pace(run, window),
    )
    goes_on = run.callbacks.step(run.world, report)
    run.timer.start()  # the program's time is no step's
    return goes_on

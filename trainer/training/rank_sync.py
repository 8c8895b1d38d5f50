"""Ranks exchange loss, failures, signals and time while they train: about once a second, not once a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from trainer.errors import Interrupted, NotFiniteError, Preempted, TrainerError
from trainer.training import noticing, snapshots
from trainer.training.run import Run
from trainer.training.speed_test import SECONDS


class Told(NamedTuple):
    """What a rank tells; what is said or counted is 1, and the ranks add it up."""

    loss: float
    seconds: float  # of a step
    bad: float  # a loss or gradient was not finite
    interrupted: float  # by Ctrl-C
    stopped: float  # by any signal
    late: float  # a measurement of speed has used up its time
    unsaved: float  # a save has failed
    due: float  # time to save


@dataclass(frozen=True)
class Agreed:
    """What all ranks know at the same step."""

    loss: float  # summed over the ranks and over the steps since the last logged one; 0 within an evaluation
    steps: int  # of which it is the sum: those that were not skipped as not finite
    finite: bool  # whether all losses and gradients of these were
    stop: type[TrainerError] | None  # the signal to stop at, if one came
    late: bool  # whether a mere measurement of speed has used up its time
    save: bool  # whether it is time to
    # Of each, where all do the same work, the seconds of a step, of waiting for data in it, and of its forward pass.
    ranks: list[list[float]]
    # This rank's steps, seconds, and seconds of waiting for data since the last logged step, without warm-up
    window: tuple[int, float, float] = (0, 0.0, 0.0)

    @property
    def mean(self) -> float:
        """Loss of a step; NaN where all were skipped."""
        return self.loss / self.steps if self.steps else math.nan

    def check(self, run: Run) -> None:
        """Raises NotFiniteError on every rank, if on any."""
        if not self.finite:
            once_more = f", once more than on_nonfinite={run.recipe.on_nonfinite} allows" * bool(run.recipe.tolerated)
            raise NotFiniteError(
                f"a loss or gradient was not finite at step {run.state.position.step} or shortly before{once_more}; "
                f"nothing was saved over. Try optimizer.lr below {run.recipe.optimizer.lr:g}, schedule.warmup_epochs, "
                "or clip_grad_norm=1"
            )


class RankSync:
    """What all ranks must know at the same step, in one small all-reduce about once a second."""

    def __init__(self, run: Run, done: int | None = None) -> None:
        self.run = run
        # The step, or batch of an evaluation, after which the ranks synchronise again.
        self.next = (run.state.position.step if done is None else done) + 1
        self._window = (0, 0.0, 0.0)

    def after_step(self, log: bool) -> Agreed:
        """Synchronise after a training step, with the losses since the last logged one."""
        run, step = self.run, self.run.state.position.step
        run.world.heartbeat()
        by_step = dict(enumerate(torch.stack(run.state.unlogged).tolist(), step - len(run.state.unlogged) + 1))
        if run.recipe.tolerated:
            noticing.note_skipped_steps(run, [number for number, loss in by_step.items() if math.isnan(loss)])
        losses = [loss for number, loss in by_step.items() if number not in run.state.history.nonfinite]
        bad = run.state.updater.is_bad()
        steps, seconds, waited = run.timer.stop()
        run.ledger.note_steps(steps, seconds, waited)
        if run.timer.seen - steps >= run.recipe.logging.warmup_steps:
            before = self._window
            self._window = (before[0] + steps, before[1] + seconds, before[2] + waited)
        first = run.timer.seen <= max(1, steps)
        pace, watch = seconds / max(1, steps), run.strategy.forward_watch
        mine = None if watch is None else (pace, waited / max(1, steps), watch.lap())
        agreed = self.exchange(step, pace, math.fsum(losses), len(losses), bad, first, mine)
        if agreed.ranks and not first:
            with run.ledger.span("logging"):
                noticing.watch_ranks(run, steps, agreed.ranks)
        if log:
            self._window = (0, 0.0, 0.0)
        return agreed

    def exchange(
        self,
        done: int,
        seconds: float,
        loss: float = 0.0,
        steps: int = 0,
        bad: bool = False,
        first: bool = False,
        mine: tuple[float, float, float] | None = None,
    ) -> Agreed:
        """Send all ranks what this one knows, and set when to synchronise next.

        `done` are steps, or batches of an evaluation, and `seconds` those of one lately; in the `first` of all much is
        made ready. `mine` is this rank's part of `Agreed.ranks`.
        """
        run, window = self.run, self._window
        received = run.interrupts.received
        measured = [*run.timer.early, *run.timer.steps][1:]  # without the first two steps, in which all is made ready
        late = run.speed_only and run.world.is_main and sum(measured) > SECONDS
        due = run.world.is_main and snapshots.is_due(run)
        signals = (received is not None and received.name == "SIGINT", received is not None)
        told = Told(loss, seconds, bad, *signals, late, run.saver.error is not None, due)
        parts = torch.zeros(run.world.size if mine else 0, 3, dtype=torch.float64)  # each rank adds its own to zeros
        if mine:
            parts[run.world.rank] = torch.tensor(mine, dtype=torch.float64)
        summed = run.world.sum_(torch.cat([torch.tensor(told, dtype=torch.float64), parts.flatten()]))
        every = Told(*summed[: len(told)].tolist())
        if every.unsaved:
            snapshots.finish_saving(run)
        seconds = every.seconds / run.world.size
        self.next = done + max(1, min(1000, int(1 / max(seconds, 1e-6))))
        run.interrupts.beat()
        save_seconds = run.saver.costs[-1].seconds if run.saver.costs else 0.0
        if not first and (slow := run.interrupts.too_slow(seconds, save_seconds)):
            run.tracker.say(slow)
        stop = Interrupted if every.interrupted else Preempted if every.stopped else None
        finite = not every.bad and math.isfinite(every.loss)
        ranks = summed[len(told) :].view(-1, 3).tolist()
        return Agreed(every.loss, steps, finite, stop, every.late > 0, every.due > 0, ranks, window)


def save_and_stop(run: Run, stop: type[TrainerError]) -> None:
    """A signal that all ranks have agreed on: save, and raise `stop` on every rank."""
    with run.ledger.span("saving"):
        snapshots.save(run)
        snapshots.finish_saving(run)
    folder = run.world.broadcast_object(str(run.tracker.path))
    saved = (
        f"; saved step {run.state.position.step}: continue with output={folder} resume=auto"
        if not run.speed_only
        else ""
    )
    name = getattr(run.interrupts.received, "name", "SIGTERM")  # another rank may have received it
    raise stop(f"stopped by {'Ctrl-C' if stop is Interrupted else name}{saved}")

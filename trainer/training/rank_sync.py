"""Ranks exchange loss, failures, signals and time while they train: about once a second, not once a step."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import NamedTuple

import torch

from trainer.errors import Interrupted, NotFiniteError, Preempted, TrainerError
from trainer.training import noticing, snapshots
from trainer.training.run import Run


class Told(NamedTuple):
    """What a rank tells; what is said or counted is 1, and the ranks add it up."""

    loss: float
    seconds: float  # of a step
    bad: float  # a loss or gradient was not finite
    interrupted: float  # by Ctrl-C
    stopped: float  # by any signal
    unsaved: float  # a save has failed


@dataclass(frozen=True)
class Agreed:
    """What all ranks know at the same step."""

    loss: float  # summed over the ranks and over the steps since the last logged one; 0 within an evaluation
    finite: bool  # whether all losses and gradients of these were
    stop: type[TrainerError] | None  # the signal to stop at, if one came
    # Of each, where all do the same work, the seconds of a step, of waiting for data in it, and of its forward pass.
    ranks: list[list[float]]
    # This rank's steps, seconds, and seconds of waiting for data since the last logged step, without warm-up
    window: tuple[int, float, float]


class RankSync:
    """What all ranks must know at the same step, in one small all-reduce about once a second."""

    def __init__(self, run: Run, done: int | None = None) -> None:
        self.run = run
        # The step, or batch of an evaluation, after which the ranks synchronise again.
        self.next = (run.state.position.step if done is None else done) + 1
        self._window = (0, 0.0, 0.0)

    def after_step(self, log: bool) -> Agreed:
        """Synchronise after a training step, with the losses since the last logged one.

        Raises:
            NotFiniteError: on every rank, where a loss or gradient of any is not finite.
        """
        run, step = self.run, self.run.state.position.step
        run.world.heartbeat()
        losses = torch.stack(run.state.unlogged).tolist()
        bad = run.state.updater.is_bad()
        steps, seconds, waited = run.timer.stop()
        run.ledger.note_steps(steps, seconds, waited)
        if run.timer.seen - steps >= run.recipe.logging.warmup_steps:
            before = self._window
            self._window = (before[0] + steps, before[1] + seconds, before[2] + waited)
        first = run.timer.seen <= max(1, steps)
        pace, watch = seconds / max(1, steps), run.strategy.forward_watch
        mine = None if watch is None else (pace, waited / max(1, steps), watch.lap())
        agreed = self.exchange(step, pace, math.fsum(losses), bad, first, mine)
        if not agreed.finite:
            raise NotFiniteError(
                f"a loss or gradient was not finite at step {step} or shortly before; nothing was saved over. Try "
                f"optimizer.lr below {run.recipe.optimizer.lr:g}, schedule.warmup_epochs, or clip_grad_norm=1"
            )
        if agreed.ranks and not first:
            with run.ledger.span("logging"):
                noticing.watch_ranks(run, steps, agreed.ranks)
            if run.noticed.shares is not None:
                run.noticed.shares.add(steps, agreed.ranks)
        if log:
            self._window = (0, 0.0, 0.0)
        return agreed

    def exchange(
        self,
        done: int,
        seconds: float,
        loss: float = 0.0,
        bad: bool = False,
        first: bool = False,
        mine: tuple[float, float, float] | None = None,
    ) -> Agreed:
        """Send all ranks what this one knows, and set when to synchronise next.

        `done` are steps, or batches of an evaluation, and `seconds` those of one lately; in the `first` of all much is
        made ready. `mine` is this rank's part of `Agreed.ranks`.
        """
        run, received = self.run, self.run.interrupts.received
        signals = (received is not None and received.name == "SIGINT", received is not None)
        told = Told(loss, seconds, bad, *signals, run.saver.error is not None)
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
        return Agreed(every.loss, finite, stop, summed[len(told) :].view(-1, 3).tolist(), self._window)


def save_and_stop(run: Run, stop: type[TrainerError]) -> None:
    """A signal that all ranks have agreed on: save, and raise `stop` on every rank."""
    with run.ledger.span("saving"):
        snapshots.save(run)
        snapshots.finish_saving(run)
    folder = run.world.broadcast_object(shlex.quote(str(run.tracker.path)))
    again = f"; saved step {run.state.position.step}: continue with recipe={folder} output={folder} resume=auto"
    saved = "" if run.speed_only else again
    name = getattr(run.interrupts.received, "name", "SIGTERM")  # another rank may have received it
    raise stop(f"stopped by {'Ctrl-C' if stop is Interrupted else name}{saved}")

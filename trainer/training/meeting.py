"""What ranks tell each other while they train: loss, failures, signals, time; about once a second, not once a step."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from trainer.errors import Interrupted, NotFiniteError, Preempted, TrainerError
from trainer.training import reporting, resuming
from trainer.training.run import Run
from trainer.training.speed_test import SECONDS


class Meeting:
    """What all ranks must know at the same step, in one small all-reduce about once a second.

    Whether a gradient was not finite, a signal came, time is up; and at a logged step the loss.
    """

    def __init__(self, run: Run, done: int | None = None) -> None:
        self.run = run
        self.next = (run.position.step if done is None else done) + 1
        self.timed = (0, 0.0, 0.0)  # steps, seconds, seconds of waiting since the last logged step, without warm-up

    def hold(self, log: bool, lr: float, norm: Tensor | None) -> bool:
        """Meet after a training step.

        Returns:
            Whether a mere measurement of speed has used up its time.

        Raises:
            NotFiniteError: on every rank, if on any.
            Interrupted, Preempted: on every rank, with this step saved.
        """
        run, step = self.run, self.run.position.step
        run.world.heartbeat()
        loss = math.fsum(torch.stack(run.unlogged).tolist()) if log else 0.0
        bad = float(run.updater.is_bad())
        steps, seconds, waited = run.timer.stop()
        begun = time.perf_counter()
        if run.timer.seen - steps >= run.recipe.logging.warmup_steps:
            self.timed = (self.timed[0] + steps, self.timed[1] + seconds, self.timed[2] + waited)
        loss, bad, stop, late = self.exchange(step, seconds / max(1, steps), loss, bad)
        if bad or not math.isfinite(loss):
            raise NotFiniteError(
                f"a loss or gradient was not finite at step {step} or shortly before; nothing was saved over. "
                f"Try optimizer.lr below {run.recipe.optimizer.lr:g}, schedule.warmup_epochs, or clip_grad_norm=1"
            )
        if log:
            self._log(loss, lr, norm)
        run.tracker.progress(step, run.position.epoch)
        run.ledger.add("logging", time.perf_counter() - begun)
        if stop is not None:
            leave(run, stop)
        return late

    def exchange(
        self, done: int, pace: float, loss: float = 0.0, bad: float = 0.0
    ) -> tuple[float, float, type[TrainerError] | None, bool]:
        """Sum over ranks: loss, bad, the signal to stop at if any, whether time is up. Sets when to meet next."""
        run = self.run
        received = run.interrupts.received
        late = run.speed_only and run.world.is_main and done >= 2 and time.perf_counter() - run.begun > SECONDS
        flags = (received is not None and received.name == "SIGINT", received is not None, late)
        mine = torch.tensor([loss, bad, pace, *flags], dtype=torch.float64)
        loss, bad, pace, interrupted, stopped, over = run.world.sum_(mine).tolist()
        pace /= run.world.size
        self.next = done + max(1, min(1000, int(1 / max(pace, 1e-6))))
        run.interrupts.beat()
        if slow := run.interrupts.too_slow(pace):
            run.tracker.say(slow)
        return loss, bad, (Interrupted if interrupted else Preempted if stopped else None), over > 0

    def _log(self, loss: float, lr: float, norm: Tensor | None) -> None:
        run, count, (steps, seconds, _) = self.run, len(self.run.unlogged), self.timed
        run.history.epoch_loss += loss
        run.history.epoch_steps += count
        values = reporting.step_values(run, loss / count, lr, norm.item() if norm is not None else None, self.timed)
        values |= run.strategy.figures()
        run.tracker.scalars(values, run.position.step)
        run.tracker.step(
            {
                "step": run.position.step,
                "epoch": run.position.epoch,
                "seconds": round(run.seconds(), 3),
                "train_loss": loss / count,
                "lr": lr,
                "samples_per_sec": float(f"{steps * run.loader.samples_per_step / seconds:.6g}") if seconds else "",
            }
        )
        run.unlogged.clear()
        self.timed = (0, 0.0, 0.0)


def leave(run: Run, stop: type[TrainerError]) -> None:
    """A signal that all ranks have agreed on: save and go."""
    resuming.save(run)
    folder = run.world.share(str(run.tracker.path))
    saved = f"; saved step {run.position.step}: continue with output={folder} resume=auto" if not run.speed_only else ""
    name = getattr(run.interrupts.received, "name", "SIGTERM")  # another rank may have heard it
    raise stop(f"stopped by {'Ctrl-C' if stop is Interrupted else name}{saved}")

"""Wiring, then THE loop, read from top to bottom."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from trainer import faults, launching, reporting, resuming, strategies
from trainer.checkpoint import Position
from trainer.data import Loader, full_batches, open_datasets
from trainer.errors import Interrupted, NotFiniteError, Preempted, TrainerError
from trainer.evaluation import evaluate
from trainer.interrupts import LONGEST, Interrupts
from trainer.metrics import StepTimer, forward_flops, peak_flops, peak_memory
from trainer.models import build, initialise
from trainer.optimization import MovingAverage, Updater, build_optimizer, learning_rate, total_steps
from trainer.randomness import seed_everything, seed_ranks
from trainer.recipe import Recipe
from trainer.run import Run
from trainer.run_folder import RunFolder
from trainer.speed_test import SECONDS, speed_recipe
from trainer.tracking import NullTracker, Tracker
from trainer.world import keep_freed_memory, locate


def train(recipe: Recipe, plugin: str | None = None) -> dict[str, Any]:
    """Train as the recipe says and return what `result.json` holds.

    A many-process mode starts torchrun and waits for it; everything else runs in this process.

    Raises:
        TrainerError: one of the kinds in `trainer.errors`, with the exit code that the command line would give.
    """
    if launching.wants_children(recipe):
        return launching.train_in_children(recipe, plugin)
    launching.load_plugin(plugin)
    return run(recipe)


def run(recipe: Recipe) -> dict[str, Any]:
    """Train in this process, as the rank that the environment says; returns rank 0's result on every rank."""
    with Interrupts() as interrupts:
        tracker: list[NullTracker] = [NullTracker()]
        this: Run | None = None
        try:
            this = prepare(recipe, interrupts, tracker)
            loop(this)
            return finish(this)
        except BaseException as error:
            # Leave word of how the run ended; nothing collective, nothing saved.
            if this is not None:
                status = "preempted" if isinstance(error, Interrupted | Preempted) else "failed"
                this.tracker.result(reporting.result(this, status, str(error) or type(error).__name__))
            tracker[0].close()
            raise


# ---------------------------------------------------------------------------------------------------- wiring


def prepare(recipe: Recipe, interrupts: Interrupts, tracker: list[NullTracker]) -> Run:
    """Everything before the first step, in the order in which it can fail: what needs no peers comes first."""
    begun = time.perf_counter()
    keep_freed_memory()
    seed_everything(recipe.seed, recipe.deterministic)
    data = open_datasets(recipe)
    world = locate(recipe)
    steps_per_epoch = full_batches(len(data.train), recipe, world.size)
    model = build(recipe.model, len(data.classes), data.channels, data.image_size)
    if world.is_main:
        tracker[0] = Tracker(recipe, RunFolder(recipe))
    world.connect(recipe.timeout)
    speed_only = data.synthetic and recipe.data.name != "synthetic"
    if speed_only:
        recipe = speed_recipe(recipe, model, data, world, tracker[0].say)
    state = resuming.newest(tracker[0], world)
    if state is not None:
        initialise(model, state.tensors["model"], "the checkpoint")

    peak = peak_flops(world.device)
    shape = (1, data.channels, data.image_size, data.image_size)
    strategy = strategies.create(recipe, world)
    strategy.setup(model)
    optimizer = build_optimizer(strategy.named_parameters(), recipe.optimizer)
    updater = Updater(optimizer, recipe, world.device)
    strategy.scale = updater.scaler.scale if updater.scaler is not None else None
    this = Run(
        recipe=recipe,
        interrupts=interrupts,
        datasets=data,
        world=world,
        tracker=tracker[0],
        strategy=strategy,
        loader=Loader(data, recipe, strategy.shard(), world.device, world.place.local_size),
        optimizer=optimizer,
        updater=updater,
        average=None,
        timer=StepTimer(world.device, recipe.logging.warmup_steps),
        total_steps=total_steps(recipe, steps_per_epoch),
        steps_per_epoch=steps_per_epoch,
        num_classes=recipe.model.num_classes or len(data.classes),
        speed_only=speed_only,
        begun=begun,
        flops_per_sample=forward_flops(model, shape) if peak else 0,
        peak_flops=peak,
    )
    this.average = MovingAverage(this.weights(), recipe.ema) if recipe.ema is not None else None
    seed_ranks(recipe.seed, world.rank)
    this.tracker.say(reporting.banner(this))
    if state is not None:
        resuming.restore(this, state)
    this.tracker.start(this.position.step, this.total_steps)
    return this


# ------------------------------------------------------------------------------------------------------ loop


def loop(run: Run) -> None:
    """Train epoch by epoch until the steps are done."""
    run.interrupts.beat(LONGEST)
    for epoch in range(run.position.epoch, run.recipe.epochs):
        if run.position.step >= run.total_steps and run.position.step_in_epoch == 0:
            break  # a finished run, continued
        train_epoch(run, epoch)
        end_epoch(run, epoch)


def train_epoch(run: Run, epoch: int) -> None:
    """The steps of one epoch, or what is left of them."""
    recipe, strategy, parameters = run.recipe, run.strategy, run.optimizer.param_groups
    weight, every = 1 / recipe.batch_size, recipe.logging.every_steps
    start = run.position.step_in_epoch
    stop = min(run.steps_per_epoch, start + run.total_steps - run.position.step)
    batches = run.loader.training(epoch, start)
    meeting = Meeting(run)
    strategy.train()
    run.timer.start()
    for step_in_epoch in range(start + 1, stop + 1):
        step = run.position.step + 1
        log = step % every == 0 or step_in_epoch == stop
        lr = learning_rate(recipe, step - 1, run.steps_per_epoch)
        for group in parameters:
            group["lr"] = lr
        waited, loss = 0.0, None
        for micro in range(recipe.accumulate):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            if faults.active and faults.fault(run.world.rank, step):
                batch.inputs.fill_(torch.nan)
            part = strategy.forward_backward(batch, weight, sync=micro == recipe.accumulate - 1)
            loss = part if loss is None else loss + part
        assert loss is not None
        strategy.reduce_gradients()
        norm = run.updater.step(loss, strategy, want_norm=log)
        run.optimizer.zero_grad()
        strategy.after_step(step)
        if run.average is not None:
            run.average.update(step)
        run.window.append(loss)
        run.timer.step(waited)
        run.position = Position(step, epoch, step_in_epoch)
        run.interrupts.beat()
        save = recipe.save.every_steps and step % recipe.save.every_steps == 0
        if (log or save or meeting.due(step)) and meeting.hold(log, lr, norm):
            return
        if save:
            resuming.save(run)


class Meeting:
    """What all ranks must know at the same step, in one small all-reduce about once a second.

    Whether a gradient was not finite, a signal came, time is up; and at a logged step the loss.
    """

    def __init__(self, run: Run, done: int | None = None) -> None:
        self.run = run
        self.next = (run.position.step if done is None else done) + 1
        self.window = (0.0, 0.0, 0.0)  # steps, seconds, seconds of waiting since the last logged step

    def due(self, done: int) -> bool:
        return done >= self.next

    def hold(self, log: bool, lr: float, norm: Tensor | None) -> bool:
        """Meet after a training step.

        Returns:
            Whether a mere measurement of speed has used up its time.

        Raises:
            NotFiniteError: on every rank, if on any.
            Interrupted, Preempted: on every rank, with this step saved.
        """
        run, step = self.run, self.run.position.step
        loss = torch.stack(run.window).double().sum().item() if log else 0.0
        bad = run.updater.bad.item()
        steps, seconds, waited = run.timer.stop()
        self.window = (self.window[0] + steps, self.window[1] + seconds, self.window[2] + waited)
        loss, bad, stop, late = self.exchange(step, seconds / max(1, steps), loss, bad)
        if bad or loss != loss:
            raise NotFiniteError(
                f"a loss or gradient was not finite at step {step} or shortly before; nothing was saved over. "
                f"Try optimizer.lr below {run.recipe.optimizer.lr:g}, schedule.warmup_epochs, or clip_grad_norm=1"
            )
        if log:
            self._log(loss, lr, norm)
        if stop is not None:
            leave(run, stop)
        return late

    def exchange(
        self, done: int, pace: float, loss: float = 0.0, bad: float = 0.0
    ) -> tuple[float, float, type[TrainerError] | None, bool]:
        """Sum over ranks: loss, bad, the signal to stop at if any, whether time is up. Sets when to meet next."""
        run = self.run
        received = run.interrupts.received
        late = run.speed_only and run.world.is_main and time.perf_counter() - run.begun > SECONDS
        flags = (received is not None and received.name == "SIGINT", received is not None, late)
        mine = torch.tensor([loss, bad, pace, *flags], dtype=torch.float64)
        loss, bad, pace, interrupted, stopped, over = run.world.sum_(mine).tolist()
        pace /= run.world.size
        self.next = done + max(1, min(1000, int(1 / max(pace, 1e-6))))
        run.interrupts.beat(3 * pace)
        return loss, bad, (Interrupted if interrupted else Preempted if stopped else None), over > 0

    def _log(self, loss: float, lr: float, norm: Tensor | None) -> None:
        run, count = self.run, len(self.run.window)
        run.history.epoch_loss += loss
        run.history.epoch_steps += count
        steps, seconds, _ = self.window
        run.tracker.scalars(
            reporting.step_values(run, loss / count, lr, norm.item() if norm is not None else None, self.window),
            run.position.step,
        )
        run.tracker.step(
            {
                "step": run.position.step,
                "epoch": run.position.epoch,
                "seconds": round(run.seconds(), 3),
                "train_loss": loss / count,
                "lr": lr,
                "samples_per_sec": round(steps * run.recipe.batch_size / seconds, 1) if seconds else 0.0,
            }
        )
        run.window = []
        self.window = (0.0, 0.0, 0.0)


def end_epoch(run: Run, epoch: int) -> None:
    """Evaluate, log, save."""
    history, tracker, step = run.history, run.tracker, run.position.step
    if history.epoch_steps:
        history.losses.append(history.epoch_loss / history.epoch_steps)
        history.epoch_loss, history.epoch_steps = 0.0, 0
    note_memory(run)
    finished = step >= run.total_steps or epoch + 1 == run.recipe.epochs
    if run.speed_only:
        return
    history.validation = measure(run)
    note_skipped(run)
    improved = history.best_top1 is None or history.validation["val_top1"] > history.best_top1
    if improved:
        history.best_top1, history.best_epoch = history.validation["val_top1"], epoch
    tracker.scalars({f"val/{key}": history.validation[f"val_{key}"] for key in ("loss", "top1", "top5")}, step)
    tracker.say(reporting.epoch_line(run, epoch))
    run.position = Position(step, epoch + 1, 0)
    if improved:
        resuming.write_weights(run, "best")
    every = run.recipe.save.every_epochs
    if finished or (every and (epoch + 1) % every == 0):
        resuming.save(run)
        resuming.write_weights(run, "last")
    tracker.result(reporting.result(run, "running"))


def measure(run: Run) -> dict[str, Any]:
    """Evaluate under the averaged weights where there are any. Signals are heard between batches."""
    run.strategy.settle()
    meeting, begun, total = Meeting(run, 0), time.perf_counter(), run.loader.evaluation_batches

    def boundary(done: int) -> None:
        run.interrupts.beat()
        run.tracker.evaluating(done, total)
        if meeting.due(done) and done < total:
            _, _, stop, _ = meeting.exchange(done, (time.perf_counter() - begun) / done)
            if stop is not None:
                raise stop()

    try:
        with run.average.in_place() if run.average is not None else nullcontext():
            return evaluate(run.strategy, run.loader.evaluation(), run.world, boundary)
    except (Interrupted, Preempted) as error:
        leave(run, type(error))
        raise


def leave(run: Run, stop: type[TrainerError]) -> None:
    """A signal that all ranks have agreed on: save and go."""
    resuming.save(run)
    saved = (
        ""
        if run.speed_only
        else f"; saved step {run.position.step}: continue with output={run.tracker.path} resume=auto"
    )
    raise stop(f"stopped by {'Ctrl-C' if stop is Interrupted else 'SIGTERM'}{saved}")


def note_skipped(run: Run) -> None:
    """Unreadable images since the last epoch, over all ranks."""
    fresh = torch.tensor([float(run.loader.skipped - run.skipped)])
    run.skipped = run.loader.skipped
    run.history.skipped += int(run.world.sum_(fresh).item())


def note_memory(run: Run) -> None:
    """Peak bytes of every rank's device."""
    run.memory = dict(run.world.share(run.world.gather((run.world.name, peak_memory(run.world.device)))))
    run.tracker.scalars(
        {f"memory/peak_gib/{name}": size / 2**30 for name, size in run.memory.items()}, run.position.step
    )


def finish(run: Run) -> dict[str, Any]:
    """A run that ended well: the last result, the last line, the group dissolved."""
    if not run.memory:
        note_memory(run)
    result: dict[str, Any] = run.world.share(reporting.result(run, "completed"))
    run.tracker.result(result)
    run.tracker.close()
    run.tracker.say(reporting.last_line(run, result))
    run.loader.close()
    run.strategy.close()
    run.world.barrier()
    run.world.close()
    return result

"""Wiring, then THE loop, read from top to bottom."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer import modes
from trainer.data import Datasets, Loader, Shard, open_datasets, steps_per_epoch
from trainer.devices.precision import set_precision
from trainer.errors import DiskFullError, Interrupted, Preempted, RecipeError, SetupError, explain
from trainer.launch import launching
from trainer.models.zoo import build, initialise
from trainer.modes.pipeline import timeline
from trainer.processes import faults
from trainer.processes.interrupts import Interrupts
from trainer.processes.world import World, keep_freed_memory, locate
from trainer.recipe import Recipe
from trainer.saving.checkpoint import Position, State
from trainer.saving.run_folder import RunFolder, as_before
from trainer.telemetry.clocks import StepTimer
from trainer.telemetry.device_memory import peak_memory
from trainer.telemetry.flops import forward_flops, peak_flops
from trainer.telemetry.tracking import NullTracker, Tracker
from trainer.training import diagnosis, reporting, resuming
from trainer.training.evaluation import evaluate
from trainer.training.meeting import Meeting, leave
from trainer.training.optimization import MovingAverage, Updater, build_optimizer, learning_rate, total_steps
from trainer.training.randomness import seed_everything, seed_ranks
from trainer.training.run import Run
from trainer.training.speed_test import speed_recipe


def train(recipe: Recipe, plugin: str | None = None) -> dict[str, Any]:
    """Train as the recipe says and return what `result.json` holds.

    A many-process mode starts torchrun and waits for it; everything else runs in this process.

    Raises:
        TrainerError: one of the kinds in `trainer.errors`, with the exit code that the command line would give.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RecipeError('a child of this script trains again: put train(...) under if __name__ == "__main__":')
    if launching.wants_children(recipe):
        return launching.train_in_children(recipe, plugin)
    launching.load_plugin(plugin)
    return run(recipe)


def run(recipe: Recipe, own_process: bool = False) -> dict[str, Any]:
    """Train in this process, as the rank that the environment says; returns rank 0's result on every rank.

    `own_process` says that a second Ctrl-C, or a signal while a peer is lost, may end the process on the spot.
    """
    this: Run | None = None
    with Interrupts(own_process, recipe.grace) as interrupts, ExitStack() as closing:
        try:
            this = prepare(recipe, interrupts, closing)
            loop(this)
            return finish(this)
        except BaseException as error:
            # Leave word of how the run ended; nothing collective, nothing saved.
            if this is not None and this.tracker.path is not None:
                status = "preempted" if isinstance(error, Interrupted | Preempted) else "failed"
                with suppress(SetupError, DiskFullError):  # where the folder is what failed, the first error tells
                    this.tracker.result(reporting.result(this, status, *explain(error)))
            raise


# ---------------------------------------------------------------------------------------------------- wiring


def prepare(recipe: Recipe, interrupts: Interrupts, closing: ExitStack) -> Run:
    """Everything before the first step, in the order in which it can fail: what needs no peers comes first."""
    begun = time.perf_counter()
    keep_freed_memory()
    seed_everything(recipe.seed, recipe.deterministic)
    set_precision(recipe.precision)
    recipe = as_before(recipe)
    data = open_datasets(recipe)
    if "images" in data.notes:  # a look at them chose: from here on the recipe says so
        recipe = recipe.replace(data__image_size=data.image_size, data__channels=data.channels)
    world = locate(recipe)
    steps = steps_per_epoch(len(data.train), recipe, modes.create(recipe, world).shard())
    tracker = Tracker(recipe, RunFolder(recipe)) if world.is_main else NullTracker()
    closing.callback(tracker.close)
    world.connect(recipe.timeout)
    state = resuming.newest(tracker, world)
    model = build_model(recipe, data, state)
    speed_only = data.synthetic and recipe.data.name != "synthetic"
    if speed_only:
        recipe = speed_recipe(recipe, model, data, world, tracker.say)
    size = sum(parameter.numel() for parameter in model.parameters())
    peak, flops = utilisation_base(model, data, world, recipe.precision)

    strategy = modes.create(recipe, world)
    shard = strategy.shard()
    rows = recipe.batch_size // (shard.count * recipe.accumulate)
    strategy.say, strategy.samples = tracker.say, len(data.train)
    strategy.batch_norm = any(isinstance(layer, _BatchNorm) for layer in model.modules())
    strategy.known = world.share(tracker.known())
    strategy.setup(model, (rows, data.channels, data.image_size, data.image_size))
    tracker.remember(strategy.known)
    optimizer = build_optimizer(strategy.named_parameters(), recipe.optimizer)
    updater = Updater(optimizer, recipe, world.device)
    strategy.scale = updater.scaler.scale if updater.scaler is not None else None
    this = Run(
        recipe=recipe,
        interrupts=interrupts,
        datasets=data,
        world=world,
        tracker=tracker,
        strategy=strategy,
        loader=Loader(data, recipe, shard, world.device, local_readers(world, shard)),
        optimizer=optimizer,
        updater=updater,
        average=None,
        timer=StepTimer(world.drives, recipe.logging.warmup_steps),
        total_steps=total_steps(recipe, steps),
        steps_per_epoch=steps,
        num_classes=recipe.model.num_classes or len(data.classes),
        model_size=size,
        speed_only=speed_only,
        begun=begun,
        flops_per_sample=flops,
        peak_flops=peak,
    )
    this.average = MovingAverage(this.weights(), recipe.ema) if recipe.ema is not None else None
    seed_ranks(recipe.seed, world.rank)
    this.tracker.say(reporting.banner(this))
    if state is not None:
        resuming.restore(this, state)
    this.tracker.start(this.position, this.total_steps)
    if this.position.step == 0:
        this.tracker.text("mode", reporting.mode_lines(this), 0)
    return this


def local_readers(world: World, shard: Shard) -> int:
    """Ranks of this machine that read images: of a pipeline's, one a replica."""
    return max(1, world.place.local_size * shard.count // world.size)


def build_model(recipe: Recipe, data: Datasets, state: State | None) -> nn.Module:
    """The model with its starting weights: a checkpoint's, where there is one."""
    model = build(recipe.model, len(data.classes), data.channels, data.image_size, starting=state is None)
    if state is not None:
        initialise(model, state.tensors["model"], "the checkpoint", whole=True)
    return model


def utilisation_base(model: nn.Module, data: Datasets, world: World, precision: str) -> tuple[float | None, int]:
    """The device's peak FLOP/s in this precision and one image's forward FLOPs, where both can be known."""
    peak = peak_flops(world.device, precision)
    if peak is None:
        return None, 0
    try:
        return peak, forward_flops(model, (1, data.channels, data.image_size, data.image_size))
    except (NotImplementedError, RuntimeError):  # an operator, or a look at values, that shapes alone do not have
        return None, 0


# ------------------------------------------------------------------------------------------------------ loop


def loop(run: Run) -> None:
    """Train epoch by epoch until the steps are done."""
    run.ledger.add("start-up", time.perf_counter() - run.begun)
    for epoch in range(run.position.epoch, run.recipe.epochs):
        if run.position.step >= run.total_steps and run.position.step_in_epoch == 0:
            break
        train_epoch(run, epoch)
        end_epoch(run, epoch)


def train_epoch(run: Run, epoch: int) -> None:
    """The steps of one epoch, or what is left of them."""
    recipe, strategy, groups = run.recipe, run.strategy, run.optimizer.param_groups
    rate = learning_rate(recipe, run.steps_per_epoch)
    weight, every = 1 / run.loader.samples_per_step, recipe.logging.every_steps
    start = run.position.step_in_epoch
    stop = min(run.steps_per_epoch, start + run.total_steps - run.position.step)
    batches = run.loader.training(epoch, start)
    meeting = Meeting(run)
    run.interrupts.beat()
    strategy.train()
    unlogged = run.unlogged
    run.timer.start()
    for step_in_epoch in range(start + 1, stop + 1):
        step = run.position.step + 1
        log = step % every == 0 or step_in_epoch == stop
        lr = rate(step - 1 - run.shift)
        for group in groups:
            group["lr"] = lr
        waited, loss = 0.0, None
        for micro in range(recipe.accumulate):
            run.timer.ask()
            batch = next(batches)
            waited += run.timer.arrive()
            if faults.active and faults.fault(run.world.rank, step):
                batch.inputs.fill_(torch.nan)
            part = strategy.forward_backward(batch, weight, sync=micro == recipe.accumulate - 1)
            loss = part if loss is None else loss + part
        assert loss is not None
        strategy.reduce_gradients()
        run.timer.update()
        norm = run.updater.step(loss, strategy, want_norm=log)
        run.optimizer.zero_grad()
        strategy.after_step(step)
        if run.average is not None:
            run.average.update(step)
        unlogged.append(loss)
        run.timer.step(waited)
        run.position = Position(step, epoch, step_in_epoch)
        run.interrupts.beat()
        save = recipe.save.every_steps and step % recipe.save.every_steps == 0 and step_in_epoch < stop
        if (log or save or step >= meeting.next) and meeting.hold(log, lr, norm):
            run.total_steps = step
            return
        if save:
            with run.ledger.span("saving"):
                resuming.save(run)


def end_epoch(run: Run, epoch: int) -> None:
    """Evaluate, log, save."""
    history, tracker, step = run.history, run.tracker, run.position.step
    with run.ledger.span("averaging"):
        run.strategy.after_epoch(run.average.tensors() if run.average is not None else {})
    if history.epoch_steps:
        history.losses.append(history.epoch_loss / history.epoch_steps)
        history.epoch_loss, history.epoch_steps = 0.0, 0
    if run.recipe.pipeline.timeline:
        steps = run.strategy.timeline()
        if steps and tracker.path is not None:
            timeline.write(tracker.path, steps)
    note_memory(run)
    tracker.scalars({f"memory/peak_gib/{name}": size / 2**30 for name, size in run.memory.items()}, step)
    finished = step >= run.total_steps or epoch + 1 == run.recipe.epochs
    if run.speed_only:
        run.position = Position(step, epoch + 1, 0)
        return
    with run.ledger.span("evaluation"):
        history.validation = measure(run)
    note_skipped(run)
    improved = history.best_top1 is None or history.validation["val_top1"] > history.best_top1
    if improved:
        history.best_top1, history.best_epoch = history.validation["val_top1"], epoch
    tracker.scalars({f"val/{key}": history.validation[f"val_{key}"] for key in ("loss", "top1", "top5")}, step)
    tracker.say(reporting.epoch_line(run, epoch))
    run.position = Position(step, epoch + 1, 0)
    save = run.recipe.save
    with run.ledger.span("saving"):
        if improved:
            resuming.write_weights(run, "best")
        if finished or any(n and m % n == 0 for n, m in ((save.every_epochs, epoch + 1), (save.every_steps, step))):
            resuming.write_weights(run, "last")  # first: killed in between, a finished run has no epoch to do again
            resuming.save(run)
    tracker.result(reporting.result(run, "running"))


def measure(run: Run) -> dict[str, Any]:
    """Evaluate under the averaged weights where there are any. Signals are heard between batches."""
    run.interrupts.beat()
    run.strategy.settle(run.average.tensors() if run.average is not None else {})
    meeting, begun, total = Meeting(run, 0), time.perf_counter(), run.loader.evaluation_batches

    def boundary(done: int) -> None:
        run.interrupts.beat()
        run.tracker.evaluating(done, total)
        if meeting.next <= done < total:
            _, _, stop, _ = meeting.exchange(done, (time.perf_counter() - begun) / done)
            if stop is not None:
                raise stop()

    try:
        with run.average.in_place() if run.average is not None else nullcontext():
            return evaluate(run.strategy, run.loader.evaluation(), run.world, boundary)
    except (Interrupted, Preempted) as error:
        leave(run, type(error))
        raise


def note_skipped(run: Run) -> None:
    """Unreadable images since the last epoch, over all ranks."""
    fresh = torch.tensor([float(run.loader.skipped - run.skipped)])
    run.skipped = run.loader.skipped
    run.history.skipped += int(run.world.sum_(fresh).item())


def note_memory(run: Run) -> None:
    """Peak bytes of every rank's device."""
    mine = {name: peak_memory(device) for name, device in run.world.driven().items()}
    gathered = run.world.share(run.world.gather(mine))
    run.memory = {name: size for part in gathered for name, size in part.items()}


def finish(run: Run) -> dict[str, Any]:
    """A run that ended well: the last result, the last line, the group dissolved."""
    note_memory(run)
    found = diagnosis.diagnose(run) if run.recipe.logging.verdict else None
    result: dict[str, Any] = reporting.result(run, "completed") | {"verdict": found.to_dict() if found else None}
    if run.timer.seen == 0:  # continued with no step left to train: what was measured stands
        previous = run.tracker.previous_result()
        result |= {key: previous[key] for key in reporting.KEPT_KEYS if key in previous}
    result = run.world.share(result)
    run.tracker.result(result)
    if found is not None:
        run.tracker.text("verdict", found.to_markdown(), run.position.step)
    run.tracker.say(reporting.last_line(run, result))
    run.tracker.close()
    run.loader.close()
    run.strategy.close()
    run.world.barrier()
    run.world.close()
    return result

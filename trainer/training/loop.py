"""THE loop, read from top to bottom. What it drives is put together in `setup`."""

from __future__ import annotations

import gc
import math
import time
from contextlib import ExitStack, suppress
from typing import cast

import torch

from trainer.errors import Interrupted, Preempted, SetupError, TrainerError, in_one_line
from trainer.modes.pipeline import timeline
from trainer.optim.optimization import learning_rate
from trainer.processes import stacks
from trainer.processes.interrupts import Interrupts
from trainer.processes.terminal import GREEN
from trainer.recipe import Recipe
from trainer.saving.checkpoint import Position
from trainer.saving.journal import COMPLETED, START, STEPS
from trainer.telemetry.device_memory import peak_memory
from trainer.telemetry.readable import titled
from trainer.training import callbacks, diagnosis, noticing, presenting, reporting, sharing, snapshots, stopping
from trainer.training.callbacks import Callbacks
from trainer.training.evaluation import Mistakes, Sums, evaluate, metrics_of
from trainer.training.memory_needs import repeatable, shortage_explained, to_go_on
from trainer.training.rank_sync import RankSync, save_and_stop
from trainer.training.results import Result
from trainer.training.run import Run
from trainer.training.setup import note_end, prepare


def run(recipe: Recipe, own_process: bool = False, given: Callbacks | None = None) -> Result:
    """Train in this process, as the rank that the environment says; returns rank 0's result on every rank.

    `own_process` says that a second Ctrl-C, or a signal while a peer is lost, may end the process on the spot;
    `given` is a program's callback, by default of the one that started this rank.
    """
    done = _attempt(recipe, own_process, given, since=-math.inf)
    while isinstance(done, Recipe):
        gc.collect()  # what the run has had on its device
        torch.cuda.empty_cache()
        done = _attempt(done, own_process, given, since=time.monotonic())
    return done


def _attempt(recipe: Recipe, own_process: bool, given: Callbacks | None, since: float) -> Result | Recipe:
    """Train up to the end; or give the recipe to go on with, where memory ran out and smaller pieces may fit.

    `since`: the time.monotonic() at which that happened before.
    """
    this: Run | None = None
    with Interrupts(own_process, recipe.grace) as interrupts, ExitStack() as closing:
        if not own_process:  # later errors of the program are not this run's
            closing.callback(stacks.write_to, None)
        try:
            this = prepare(recipe, interrupts, closing, given or callbacks.received)
            if not own_process:  # in a program that goes on no worker is left, however the run ends
                closing.callback(this.loader.close)
            with shortage_explained(this.resolved, this.state):
                loop(this)
                return finish(this)
        except BaseException as error:
            again = to_go_on(this, error, since) if this is not None else None
            # Write how the run ended; nothing collective, nothing saved.
            if this is not None:
                note_end(this.tracker, this.ledger, interrupts, error)
                with interrupts.saving():
                    this.saver.leave()
                    this.saver.remove_draft()
            if again is not None and this is not None:
                this.loader.close()
                return again
            if this is not None and this.tracker.path is not None:
                status = "preempted" if isinstance(error, Interrupted | Preempted) else "failed"
                with suppress(TrainerError):  # where the folder is what failed, the first error tells
                    line, code = in_one_line(error)
                    this.tracker.result(reporting.result(this, status, line, code))
                if isinstance(error, SetupError):  # that the folder is gone, or another's, explains it
                    this.tracker.folder.check()
            raise


def loop(run: Run) -> None:
    """Train epoch by epoch until the steps are done, or patience is lost."""
    first = run.state.position.epoch
    for epoch in range(first, run.recipe.epochs):
        if stopping.is_over(run.resolved, run.state):
            break
        begun = time.perf_counter()
        with run.ledger.span(STEPS):
            train_epoch(run, epoch)
        if run.recipe.compile and epoch == first:  # compiling its evaluation may take longer than a signal leaves
            with run.ledger.span("saving"):
                snapshots.save(run)
        end_epoch(run, epoch, begun)


def train_epoch(run: Run, epoch: int) -> None:
    """The steps of one epoch, or what is left of them."""
    recipe, strategy, steps, state = run.recipe, run.strategy, run.steps, run.state
    history, per_epoch = state.history, run.resolved.steps_per_epoch
    rate = learning_rate(recipe, per_epoch, state.total_steps - state.step_offset)
    loss_weight, every = 1 / run.loader.samples_per_step, recipe.logging.every_steps
    start = state.position.step_in_epoch
    stop = min(per_epoch, start + state.total_steps - state.position.step)
    sharing.divided(run, begins=start == 0)
    batches = run.loader.training(epoch, start, stop)
    rank_sync = RankSync(run)
    run.interrupts.beat()
    strategy.train()
    steps.check()
    unlogged = state.unlogged
    run.timer.start()
    for step_in_epoch in range(start + 1, stop + 1):
        step = state.position.step + 1
        log = step % every == 0 or step_in_epoch == stop
        lr = history.lr_factor * rate(step - 1 - state.step_offset)
        waited, loss = 0.0, None
        if steps.due:
            with run.ledger.span(f"{START}recording"), run.timer.pause():
                steps.record()
        steps.begin(lr)
        with repeatable(run):
            for micro in range(recipe.pieces):
                run.timer.ask()
                batch = next(batches)
                waited += run.timer.arrive()
                if step == 1 and micro == 0:
                    presenting.first_batch(run, batch)
                if run.teacher is not None:
                    batch = run.teacher.teach(batch)
                part = steps.forward_backward(batch, loss_weight, sync=micro == recipe.pieces - 1)
                loss = part if loss is None else loss + part
        assert loss is not None
        strategy.reduce_gradients()
        run.timer.update()
        norm = steps.update(loss, want_norm=log)
        strategy.after_step(step)
        if state.average is not None:
            state.average.update(step)
        unlogged.append(loss)
        run.timer.step(waited)
        state.position = Position(step, epoch, step_in_epoch)
        run.interrupts.beat()
        save = recipe.save.every_steps and step % recipe.save.every_steps == 0 and step_in_epoch < stop
        if log or save or step >= rank_sync.next:
            agreed, steps_since = rank_sync.after_step(log), len(unlogged)
            mean = agreed.loss / steps_since
            with run.ledger.span("logging"):
                if log:
                    history.epoch_loss += agreed.loss
                    history.epoch_steps += steps_since
                    unlogged.clear()
                    reporting.log_step(run, mean, lr, norm, agreed.window)
                run.tracker.progress(step, epoch + 1, mean, reporting.images_per_second(run, agreed.window))
            if agreed.stop is not None:
                save_and_stop(run, agreed.stop)
        if save:
            with run.ledger.span("saving"):
                snapshots.save(run)
        if step_in_epoch < stop and sharing.divided(run, begins=False):
            batches = run.loader.training(epoch, step_in_epoch, stop)


def end_epoch(run: Run, epoch: int, begun: float) -> None:
    """Evaluate, log, save. The epoch has `begun` at this time.perf_counter()."""
    state, tracker = run.state, run.tracker
    history, step = state.history, state.position.step
    with run.ledger.span("averaging"):
        run.strategy.after_epoch(state.averages())
    if history.epoch_steps:
        history.losses.append(history.epoch_loss / history.epoch_steps)
        history.epoch_loss, history.epoch_steps = 0.0, 0
    if run.recipe.pipeline.timeline:
        steps = run.strategy.timeline()
        if steps and tracker.path is not None:
            timeline.write(tracker.path, steps)
    note_memory(run)
    tracker.scalars({f"memory/peak_gib/{name}": size / 2**30 for name, size in run.observer.memory.items()}, step)
    if run.speed_only:
        state.position = Position(step, epoch + 1, 0)
        return
    last = stopping.may_be_last(run.recipe, state, epoch)
    mistakes = Mistakes(run.task) if last else None
    trained = time.perf_counter()
    with run.ledger.span("evaluation"), repeatable(run):
        history.validation = measure(run, mistakes, None if last else epoch + 1)
    history.latest = [*history.latest, metrics_of(history.validation)][-noticing.LATEST :]
    speed = history.validation["val_samples"] / (time.perf_counter() - trained)
    note_skipped(run)
    improved = run.task.improves(history.validation[f"val_{run.task.metric}"], history.best)
    if improved:
        history.best, history.best_epoch = history.validation[f"val_{run.task.metric}"], epoch
    values = {f"val/{name}": value for name, value in metrics_of(history.validation).items()}
    values |= {"speed/val_samples_per_sec": speed}
    if goodput := tracker.journal.goodput():
        values["speed/goodput_pct"] = 100 * goodput["fraction"]
    tracker.scalars(values, step)
    tracker.row(reporting.epoch_row(run, epoch, time.perf_counter() - begun), improved)
    state.position = Position(step, epoch + 1, 0)
    noticing.tell(run)
    if run.recipe.stop.patience is not None and stopping.lost_patience(run.resolved, state):
        tracker.say(stopping.patience_line(run.recipe.stop.patience, run.task, state.history))
    if not reporting.report_epoch(run, epoch, improved):
        state.total_steps = step
    finished = stopping.is_over(run.resolved, state) or epoch + 1 == run.recipe.epochs
    if finished and mistakes is not None:
        with run.ledger.span("evaluation"):
            presenting.mistakes(run, mistakes)
    tracker.result(reporting.result(run, "running"))
    save = run.recipe.save
    sealed = finished or any(n and m % n == 0 for n, m in ((save.every_epochs, epoch + 1), (save.every_steps, step)))
    files = ["best"] * improved + ["last"] * sealed
    with run.ledger.span("saving"):
        if files:
            snapshots.save(run, files, sealed)


def measure(run: Run, mistakes: Mistakes | None = None, then: int | None = None) -> dict[str, float]:
    """Evaluate under the averaged weights where there are any. Signals are looked at between batches.

    The epoch `then` trains afterwards: its first batches are read meanwhile.
    """
    run.interrupts.beat()
    averages = run.state.averages()
    run.strategy.sync_weights(averages)
    sync, begun, total = RankSync(run, 0), time.perf_counter(), len(run.loader.evaluation_spans)

    def boundary(done: int) -> None:
        run.interrupts.beat()
        seconds = (time.perf_counter() - begun) / done
        run.tracker.evaluating(done, total, len(run.datasets.val) / total / seconds)
        if sync.next <= done < total:
            agreed = sync.exchange(done, seconds, first=done == 1)
            if agreed.stop is not None:
                raise agreed.stop()

    try:
        with run.strategy.weights(averages):
            sums, batches = Sums(run.task), run.loader.evaluation(then)
            run.forward.begin(total)
            look = mistakes.add if mistakes is not None else None
            figures = evaluate(run.strategy, batches, run.world, boundary, look, sums, run.forward)
            noticing.note_classes(run, sums)
            return figures
    except (Interrupted, Preempted) as error:
        save_and_stop(run, type(error))
        raise


def note_skipped(run: Run) -> None:
    """Unreadable images and uncached photos since the last epoch, over all ranks."""
    now = torch.tensor([run.loader.skipped, run.loader.uncached])
    skipped, uncached = run.world.sum_((now - run.counted).double()).long().tolist()
    run.counted = now
    run.state.history.skipped += skipped
    run.state.history.uncached += uncached


def note_memory(run: Run) -> None:
    """Peak bytes of every rank's device, and what kept its machine from computing."""
    mine = {name: peak_memory(device) for name, device in run.world.driven().items()}
    gathered = run.world.broadcast_object(run.world.gather((mine, run.noticed.meter.read())))
    run.observer.memory = {name: size for part, _ in gathered for name, size in part.items()}
    run.noticed.strain = max((strain for _, strain in gathered), key=lambda strain: strain.others)


def finish(run: Run) -> Result:
    """A run that ended well: the last result, the last line, the group dissolved."""
    run.interrupts.nothing_new = lambda: False  # it leaves by itself
    with run.ledger.span("saving"):
        snapshots.finish_saving(run)
    note_memory(run)
    noticing.look(run, over=True)
    verdict = diagnosis.diagnose(run) if run.recipe.logging.verdict else None
    run.tracker.journal.end(COMPLETED)
    result = reporting.result(run, "completed")
    result["verdict"] = verdict.to_dict() if verdict else None
    if run.timer.seen == 0:  # continued with no step left to train: what was measured stands
        previous = run.tracker.folder.previous_result(run.tracker.say)
        result |= cast(Result, {key: previous[key] for key in reporting.KEPT_KEYS if key in previous})
    shared: Result = run.world.broadcast_object(result)
    run.tracker.result(shared)
    (title, text), *rest = reporting.last_lines(run, shared).items()
    run.tracker.say(titled(title, text), GREEN)
    run.tracker.print_lines(dict(rest))
    run.tracker.close()
    run.loader.close()
    run.forward.close()
    run.strategy.close()
    run.world.barrier()
    run.world.close()
    return shared

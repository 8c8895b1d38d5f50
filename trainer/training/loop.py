"""The training loop. `setup` creates the objects that it uses."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from trainer.data import Batch
from trainer.errors import Interrupted, Preempted, SetupError, TrainerError, explain_in_one_line
from trainer.launch import endings
from trainer.memory.device import peak_memory, release_garbage
from trainer.modes.pipeline import timeline
from trainer.optim.optimization import build_learning_rate
from trainer.processes import stacks
from trainer.processes.interrupts import Interrupts
from trainer.processes.terminal import BOLD, GREEN
from trainer.recipe import Recipe
from trainer.saving.checkpoint import Position
from trainer.saving.journal import COMPLETED, START, STEPS
from trainer.telemetry.rank_watch import RankWatch
from trainer.telemetry.readable import format_titled
from trainer.telemetry.symptoms import STANDSTILL_EPOCHS
from trainer.training import (
    callbacks,
    checking,
    diagnosis,
    noticing,
    presenting,
    reporting,
    sharing,
    stopping,
)
from trainer.training.callbacks import Callbacks
from trainer.training.evaluation import Mistakes, Sums, evaluate, strip_prefix
from trainer.training.memory_keys import adapt_recipe, explain_out_of_memory, undo_on_out_of_memory
from trainer.training.rank_sync import RankSync, TimeIsUp
from trainer.training.results import Result
from trainer.training.run import Run
from trainer.training.setup import current_result, note_end, prepare


def run(
    recipe: Recipe,
    own_process: bool = False,
    program_callbacks: Callbacks | None = None,
    check: Path | None = None,
) -> Result:
    """Train in this process, as the rank that the environment variables name.

    Args:
        recipe: The complete recipe.
        own_process: Whether this process exists only for this run. Then a second Ctrl-C, or a
            signal while another rank is lost, may end the process immediately.
        program_callbacks: Callback of the calling program. The default is the callback of the
            program that started this rank.
        check: Temporary run folder of a run with check=true; None for any other run.

    Returns:
        Rank 0's result, on every rank.
    """
    if check:
        recipe = checking.shorten_recipe(recipe, check)
    last_shortage = -math.inf
    started = time.perf_counter()
    while True:
        outcome = _attempt(
            recipe, own_process, program_callbacks, last_shortage, started, check is not None
        )
        if not isinstance(outcome, Recipe):
            return outcome
        recipe = outcome
        # Reference cycles keep the device memory of the ended attempt until they are collected.
        release_garbage()
        last_shortage = time.monotonic()


def _attempt(
    recipe: Recipe,
    own_process: bool,
    program_callbacks: Callbacks | None,
    last_shortage: float,
    started: float,
    is_check: bool,
) -> Result | Recipe:
    """Train to the end, or until memory runs out.

    Args:
        recipe: As in `run`.
        own_process: As in `run`.
        program_callbacks: As in `run`.
        last_shortage: Value of `time.monotonic()` when memory ran out in the previous attempt; -inf
            in the first attempt.
        started: Value of `time.perf_counter()` at the first attempt, from which `max_time` counts.
        is_check: Whether this is a run with check=true.

    Returns:
        The result, or the recipe to resume with if memory ran out and smaller micro-batches may
        fit.
    """
    this: Run | None = None
    with Interrupts(own_process, recipe.grace) as interrupts, ExitStack() as closing:
        # Stacks of later errors in the calling program must not go to this run's folder.
        if not own_process:
            closing.callback(stacks.write_to, None)
        try:
            this = prepare(recipe, interrupts, closing, program_callbacks or callbacks.received)
            this.ledger.run_start = started
            this.loader.evaluates_ends = is_check
            # The calling program continues, so no reader process may outlive the run.
            if not own_process:
                closing.callback(this.loader.close)
            with explain_out_of_memory(lambda: this):
                try:
                    loop(this)
                except TimeIsUp:
                    this.state.out_of_time = True
                lines = {}
                if is_check:
                    lines = checking.describe(this)
                if is_check and not this.resolved.speed_only:
                    this.snapshots.finish_saving()
                    build_again, saved_line = checking.reopen(this)
                    lines |= saved_line
                    # Free the first model: the device may not have enough memory for two.
                    this = None
                    this = build_again()
                result = finish(this, lines)
            endings.note_completed()
            return result
        except BaseException as error:
            if this is None:
                raise
            next_recipe = adapt_recipe(this, error, last_shortage)
            # The lines below save nothing and call no collective, because other ranks may be gone.
            note_end(this.tracker, this.ledger, interrupts, error)
            with interrupts.saving():
                this.saver.leave()
                this.saver.remove_draft()
            if next_recipe:
                this.loader.close()
                return next_recipe
            if this.tracker.path:
                status = "failed"
                if isinstance(error, Interrupted | Preempted):
                    status = "preempted"
                # If the run folder itself failed, the first error is the one to report.
                with suppress(TrainerError):
                    line, code = explain_in_one_line(error)
                    this.tracker.result(current_result(this, status, line, code))
                # If the run folder has vanished or has another owner, that error is raised instead,
                # because it explains more.
                if isinstance(error, SetupError):
                    this.tracker.folder.check()
            raise


def loop(run: Run) -> None:
    """Train epoch by epoch until all steps are done or patience is exhausted."""
    first_epoch = run.state.position.epoch
    for epoch in range(first_epoch, run.recipe.epochs):
        if stopping.is_over(run.resolved, run.state):
            break
        epoch_start = time.perf_counter()
        with run.ledger.span(STEPS):
            train_epoch(run, epoch)
        # Compiling the evaluation may take longer than the grace period after a signal, so the
        # training of this epoch is saved first.
        if run.recipe.compile and epoch == first_epoch:
            with run.ledger.span("saving"):
                run.snapshots.save()
        end_epoch(run, epoch, epoch_start)


def train_epoch(run: Run, epoch: int) -> None:
    """Train the remaining steps of one epoch."""
    recipe = run.recipe
    strategy = run.strategy
    steps = run.steps
    state = run.state
    history = state.history
    per_epoch = run.resolved.steps_per_epoch
    rate = build_rate(run)
    if state.position.step:
        state.lr = rate(state.position.step)
    loss_weight = 1 / run.loader.samples_per_step
    save_every = recipe.save.every_steps
    start = state.position.step_in_epoch
    # The run may have been killed between this step and its evaluation.
    may_evaluate = 0 < start < per_epoch and state.position.step < state.total_steps
    if may_evaluate and is_evaluation_due(run):
        files = evaluate_within_epoch(run, epoch)
        if files:
            run.snapshots.save(files, sealed=False)
    stop = min(per_epoch, start + state.total_steps - state.position.step)
    measures_shares = run.noticed.shares is not None
    update_shares(run, epoch_begins=start == 0)
    batches = open_batches(run, stop)
    rank_sync = RankSync(run.observer, run.snapshots, run.verifier, state.position.step)
    run.interrupts.beat()
    strategy.train()
    if strategy.update_trainable():
        state.updater.follow(state.parameters)
        steps.forget()
    steps.check()
    unlogged = state.unlogged
    run.timer.start()
    for step_in_epoch in range(start + 1, stop + 1):
        step = state.position.step + 1
        log = step % recipe.logging.every_steps == 0 or step_in_epoch == stop
        # The loss until an evaluation is in its row of epochs.csv.
        log = log or is_evaluation_step(run, step)
        state.lr = rate(step)
        data_wait = 0.0
        loss = None
        if steps.should_capture:
            if strategy.captures_exchange:
                # The host will wait for the device, and so for the other ranks.
                run.world.heartbeat()
            with run.ledger.span(f"{START}recording"), run.timer.pause():
                steps.capture()
        steps.begin(state.lr)
        with undo_on_out_of_memory(run):
            for micro_step in range(recipe.pieces):
                run.timer.ask()
                batch = next(batches)
                data_wait += run.timer.arrive()
                if step == 1 and micro_step == 0:
                    presenting.show_first_batch(run.tracker, run.datasets, run.task, batch)
                if run.teacher:
                    batch = run.teacher.teach(batch)
                if micro_step == 0 and run.verifier.is_due(step):
                    run.verifier.verify(batch, loss_weight)
                # A mode that exchanges gradients in the backward pass does so once a step, in the
                # last pass.
                sync = micro_step == recipe.pieces - 1
                micro_loss = steps.forward_backward(batch, loss_weight, sync=sync)
                loss = micro_loss if loss is None else loss + micro_loss
                if run.noticed.passes_to_compare:
                    noticing.compare_passes(run.resolved, strategy, run.noticed)
        assert loss is not None
        strategy.reduce_gradients()
        run.timer.update()
        norm = steps.update(loss, want_norm=log)
        strategy.after_step(step)
        if state.average:
            state.average.update(step)
        unlogged.append(loss)
        run.timer.step(data_wait)
        state.position = Position(step, epoch, step_in_epoch)
        run.interrupts.beat()
        # The last step of an epoch is saved after its evaluation, by `end_epoch`.
        save = save_every and step % save_every == 0 and step_in_epoch < stop
        should_evaluate = step_in_epoch < stop and is_evaluation_due(run)
        if log or save or should_evaluate or step >= rank_sync.next:
            # This exchange makes the host wait for the device and the other ranks, so it does not
            # happen in every step.
            synced = rank_sync.after_step(log)
            steps_since_log = len(unlogged)
            mean_loss = synced.loss / steps_since_log
            window_steps, window_seconds, _ = synced.window
            speed = reporting.compute_speed(
                run.loader.samples_per_step, window_steps, window_seconds
            )
            with run.ledger.span("logging"):
                if log:
                    history.epoch_loss += synced.loss
                    history.epoch_steps += steps_since_log
                    unlogged.clear()
                    reporting.log_step(state, run.observer, mean_loss, norm, speed, synced.window)
                run.tracker.progress(step, epoch + 1, mean_loss, speed)
                noticing.print_early_load(run.resolved, state, run.noticed)
            if log:
                report_to_program(
                    run, "on_step", loss=mean_loss, lr=state.lr, samples_per_sec=speed
                )
            if synced.stop:
                rank_sync.save_and_stop(synced.stop)
        files = []
        if should_evaluate and step < state.total_steps:
            files = evaluate_within_epoch(run, epoch, speed)
            steps.check()
            batches = open_batches(run, stop)
        # If a callback has ended the run here, `end_epoch` saves the checkpoint of this step.
        is_over = step >= state.total_steps
        sealed = bool(save) and not is_over
        if sealed or files:
            with run.ledger.span("saving"):
                run.snapshots.save(files, sealed)
        if is_over:
            break
        if measures_shares and step_in_epoch < stop and update_shares(run, epoch_begins=False):
            batches = open_batches(run, stop)


def open_batches(run: Run, stop: int) -> Iterator[Batch]:
    """Return the micro-batches from the present step to the next evaluation within the epoch.

    Without such an evaluation, they end at the step `stop` of the epoch. Workers do not read beyond
    an evaluation, because it would drop what they have read.
    """
    step, epoch, start = run.state.position
    every = run.recipe.evaluate.every_steps
    if every is not None and not run.resolved.speed_only:
        stop = min(stop, start + every - step % every)
    return run.loader.training(epoch, start, stop)


def is_evaluation_step(run: Run, step: int) -> bool:
    """Return whether `evaluate.every_steps` asks for an evaluation after a step."""
    every = run.recipe.evaluate.every_steps
    return every is not None and not run.resolved.speed_only and step % every == 0


def is_evaluation_due(run: Run) -> bool:
    """Return whether the present step of `evaluate.every_steps` has not been evaluated yet."""
    step = run.state.position.step
    return is_evaluation_step(run, step) and step not in (0, run.state.history.evaluated_step)


def evaluate_within_epoch(run: Run, epoch: int, speed: float | None = None) -> list[str]:
    """Evaluate between two steps of an epoch, without a change to the training. Collective.

    Args:
        run: The run.
        epoch: Epoch of the step, counted from 0.
        speed: Images per second of the last steps, or None if unknown.

    Returns:
        Names of the weights files to save: "best", or none.
    """
    history = run.state.history
    step = run.state.position.step
    with run.ledger.span("evaluation"), undo_on_out_of_memory(run):
        history.validation = measure(run)
    # No step of the epoch may have been logged yet.
    train_loss = math.nan
    if history.epoch_steps:
        train_loss = history.epoch_loss / history.epoch_steps
    is_best = note_evaluation(run, epoch, train_loss, speed)
    metrics = strip_prefix(history.validation)
    run.tracker.scalars({f"val/{name}": value for name, value in metrics.items()}, step)
    style = BOLD if is_best else ""
    run.tracker.say(f"  step {step}: {run.task.text(metrics)}", style)
    report_to_program(run, "on_evaluation", metrics=metrics, best=is_best)
    # Only the start of an epoch may change which parameters train.
    run.strategy.train_for_probe()
    run.timer.start()
    return ["best"] if is_best else []


def note_evaluation(run: Run, epoch: int, train_loss: float, speed: float | None) -> bool:
    """Record `history.validation`, which is of the present step, in the history and epochs.csv.

    Args:
        run: The run.
        epoch: Epoch of the step, counted from 0.
        train_loss: Mean training loss of the epoch so far.
        speed: Images per second of the last steps, or None if unknown.

    Returns:
        Whether the task's metric is the best so far.
    """
    state = run.state
    history = state.history
    step = state.position.step
    metrics = strip_prefix(history.validation)
    name = run.task.metric
    metric = metrics[name]
    is_best = run.task.improves(metric, history.best)
    if is_best:
        history.best = metric
        history.best_epoch = epoch
        history.metric = name
    # A loss that is not finite has warnings of its own.
    if math.isnan(metric) and name != "loss":
        run.noticed.lasting["metric"] = (
            f"val_{name} is not a number in epoch {epoch + 1}, which cannot be the best: it is "
            "undefined for these held-out images, or the outputs are not finite; task.metric= "
            "chooses another metric"
        )
    history.evaluated_step = step
    # If a callback has ended the run within an epoch, this step is evaluated a second time.
    history.evaluations = [one for one in history.evaluations if one["step"] < step]
    evaluation = {"epoch": epoch + 1, "step": step, "train_loss": train_loss}
    # A metric of a user's task may have one of these names.
    others = {name: value for name, value in metrics.items() if name not in evaluation}
    history.evaluations.append(evaluation | others)
    row = {
        **evaluation,
        "seconds": round(state.seconds(), 3),
        "lr": state.lr,
        "samples_per_sec": "" if speed is None else float(f"{speed:.6g}"),
    }
    run.tracker.epoch(row | {f"val_{name}": value for name, value in others.items()})
    return is_best


def report_to_program(run: Run, name: str, **values: Any) -> None:
    """Call the program's callback `name`, log its values, and let it end the run. Collective.

    `values` are the fields of the callback's report, except those of every report.
    """
    state = run.state
    step, epoch, step_in_epoch = state.position
    # At the end of an epoch, the position is that of the next.
    if step_in_epoch:
        epoch += 1
    report = callbacks.REPORTS[name](epoch=epoch, step=step, seconds=state.seconds(), **values)
    answer = run.callbacks.report(run.world, name, report)
    state.history.logged |= answer.logged
    logged = {f"logged/{key}": value for key, value in answer.logged.items()}
    run.tracker.scalars(logged, step)
    if not answer.go_on:
        state.total_steps = step


def build_rate(run: Run) -> Callable[[int], float]:
    """Return a function from the number of a step, counted from 1, to its learning rate."""
    state = run.state
    steps = state.total_steps - state.step_offset
    rate = build_learning_rate(run.recipe, run.resolved.steps_per_epoch, steps)
    # The rate of the last finished step is also asked for. If a change of the mode has rounded the
    # position down to the start of the first epoch, that step is `step_offset`, which gives -1.
    return lambda step: state.history.lr_factor * rate(max(0, step - 1 - state.step_offset))


def update_shares(run: Run, epoch_begins: bool) -> bool:
    """Change the ranks' shares of a batch if measured speeds suggest it. Collective.

    Returns:
        Whether the shares have changed.
    """
    rows = sharing.choose_rows(run.resolved, run.state, run.observer, epoch_begins)
    if rows is None:
        return False
    strategy = run.strategy
    share = replace(strategy.share, numbers=tuple(rows))
    strategy.set_shares(share)
    example = replace(strategy.context.example, rows=rows[share.index])
    strategy.context = replace(strategy.context, example=example)
    run.loader.set_shares(strategy.share.numbers)
    # Captured steps, timers and observations are for the old shapes, so they start from scratch.
    run.steps.forget()
    run.forward.close()
    run.noticed.ranks = RankWatch()
    run.timer.start()
    return True


def end_epoch(run: Run, epoch: int, epoch_start: float) -> None:
    """Evaluate, log and save after an epoch that began at `time.perf_counter() == epoch_start`."""
    state = run.state
    tracker = run.tracker
    history = state.history
    step = state.position.step
    with run.ledger.span("averaging"):
        run.strategy.after_epoch(state.averages())
    if history.epoch_steps:
        history.losses.append(history.epoch_loss / history.epoch_steps)
        history.epoch_loss = 0.0
        history.epoch_steps = 0
    if run.recipe.pipeline.timeline:
        timed_steps = run.strategy.timeline()
        if timed_steps and tracker.path:
            timeline.write(tracker.path, timed_steps)
    note_memory(run)
    memory = run.observer.memory.items()
    peaks = {f"memory/peak_gib/{name}": size / 2**30 for name, size in memory}
    tracker.scalars(peaks, step)
    if run.resolved.speed_only:
        state.position = Position(step, epoch + 1, 0)
        return
    may_be_last = stopping.may_be_last(run.recipe, state, epoch)
    mistakes = Mistakes(run.task) if may_be_last else None
    next_epoch = None if may_be_last else epoch + 1
    evaluation_start = time.perf_counter()
    is_repeated = history.evaluated_step == step
    with run.ledger.span("evaluation"), undo_on_out_of_memory(run):
        history.validation = measure(run, mistakes, next_epoch)
    metrics = strip_prefix(history.validation)
    history.latest = [*history.latest, metrics][-STANDSTILL_EPOCHS:]
    speed = history.validation["val_samples"] / (time.perf_counter() - evaluation_start)
    note_skipped(run)
    train_speed = reporting.compute_speed(run.loader.samples_per_step, *run.timer.lap())
    is_best = note_evaluation(run, epoch, history.losses[-1], train_speed)
    # A run that ends within an epoch may be resumed there, before the epoch's own evaluation.
    if state.position.step_in_epoch == run.resolved.steps_per_epoch:
        lowered = stopping.lower_rate(run.recipe, history, epoch)
        if lowered is not None:
            tracker.say(lowered)
    values = {f"val/{name}": value for name, value in metrics.items()}
    values["speed/val_samples_per_sec"] = speed
    knn_top1 = run.observer.model.knn_top1
    if knn_top1 is not None:
        values["val/knn_top1"] = knn_top1
    if goodput := tracker.journal.goodput():
        values["speed/goodput_pct"] = 100 * goodput["fraction"]
    tracker.scalars(values, step)
    seconds = time.perf_counter() - epoch_start
    row = reporting.build_epoch_row(
        run.resolved, state, epoch, train_speed, seconds, run.observer.memory
    )
    tracker.row(row, is_best, step)
    state.position = Position(step, epoch + 1, 0)
    noticing.print_new_warnings(run.resolved, state, run.noticed)
    patience = run.recipe.stop.patience
    if patience is not None and stopping.has_lost_patience(run.resolved, state):
        tracker.say(stopping.format_patience(patience, run.task, history))
    if not is_repeated:
        report_to_program(run, "on_evaluation", metrics=metrics, best=is_best)
    report_to_program(
        run,
        "on_epoch",
        metrics=metrics,
        best=is_best,
        epochs=run.recipe.epochs,
        train_loss=history.losses[-1],
    )
    is_finished = stopping.is_over(run.resolved, state) or epoch + 1 == run.recipe.epochs
    if is_finished and mistakes:
        with run.ledger.span("evaluation"):
            presenting.report_mistakes(run.resolved, mistakes, step)
    tracker.result(current_result(run, "running"))
    save = run.recipe.save
    sealed = is_finished
    if save.every_epochs and (epoch + 1) % save.every_epochs == 0:
        sealed = True
    if save.every_steps and step % save.every_steps == 0:
        sealed = True
    files = []
    if is_best:
        files.append("best")
    if sealed:
        files.append("last")
    with run.ledger.span("saving"):
        if files:
            run.snapshots.save(files, sealed)


def measure(
    run: Run, mistakes: Mistakes | None = None, next_epoch: int | None = None
) -> dict[str, float]:
    """Evaluate with the averaged weights, if any, and react to signals between batches.

    Args:
        run: The run.
        mistakes: Collector for the worst predictions. None if they are not needed.
        next_epoch: Epoch that will be trained next, whose first batches are read during the
            evaluation. None if no epoch follows.

    Returns:
        The metrics, as `evaluate` returns them.
    """
    run.interrupts.beat()
    averages = run.state.averages()
    run.strategy.sync_weights(averages)
    rank_sync = RankSync(run.observer, run.snapshots, run.verifier)
    start = time.perf_counter()
    batch_count = len(run.loader.evaluation_spans)

    def after_batch(batches_done: int) -> None:
        run.interrupts.beat()
        seconds = (time.perf_counter() - start) / batches_done
        speed = len(run.datasets.val) / batch_count / seconds
        run.tracker.evaluating(batches_done, batch_count, speed)
        if rank_sync.next <= batches_done < batch_count:
            synced = rank_sync.exchange(batches_done, seconds, first=batches_done == 1)
            if synced.stop:
                raise synced.stop()

    try:
        with run.strategy.average_for_evaluation(averages), run.strategy.weights(averages):
            sums = Sums(run.task)
            batches = run.loader.evaluation(next_epoch)
            run.forward.begin(batch_count)

            def look(outputs: Tensor, batch: Batch) -> None:
                run.examples.add(outputs, batch)
                if mistakes is not None:
                    mistakes.add(outputs, batch)

            figures = evaluate(run.strategy, batches, sums, run.forward, after_batch, look)
            noticing.note_classes(run.task, run.noticed, sums)
            run.examples.show(run.state.position.step, is_last=mistakes is not None)
            return figures
    except (Interrupted, Preempted, TimeIsUp) as error:
        rank_sync.save_and_stop(type(error))
        raise


def note_skipped(run: Run) -> None:
    """Add the numbers of unreadable images and uncached photos to the history. Collective.

    The numbers are those of all ranks since the last call.
    """
    counts = torch.tensor([run.loader.skipped, run.loader.uncached])
    total = run.world.sum_((counts - run.counted).double())
    skipped, uncached = total.long().tolist()
    run.counted = counts
    run.state.history.skipped += skipped
    run.state.history.uncached += uncached


def note_memory(run: Run) -> None:
    """Store each device's peak memory and the highest load by other processes. Collective."""
    devices = run.world.driven()
    peaks = {name: peak_memory(device) for name, device in devices.items()}
    rank_values = run.world.gather((peaks, run.noticed.meter.read()))
    memory: dict[str, int] = {}
    strains = []
    for rank_peaks, strain in run.world.broadcast_object(rank_values):
        memory |= rank_peaks
        strains.append(strain)
    run.observer.memory = memory
    run.noticed.strain = max(strains, key=lambda strain: strain.others)


def finish(run: Run, lines: dict[str, str]) -> Result:
    """Write the final result of a successful run and destroy the process group. Collective.

    Args:
        run: The run.
        lines: Lines to print, by title; empty for those about the result and the files.

    Returns:
        The content of result.json.
    """
    # A signal must not end the process early from now on, because the run ends anyway.
    run.interrupts.nothing_new = lambda: False
    with run.ledger.span("saving"):
        run.snapshots.finish_saving()
    note_memory(run)
    noticing.update_warnings(run.resolved, run.state, run.noticed, over=True)
    verdict = None
    if run.recipe.logging.verdict:
        verdict = diagnosis.diagnose(
            run.resolved, run.state, run.observer, run.loader, run.steps.might_be_faster
        )
    run.tracker.journal.end(COMPLETED)
    result = current_result(run, "completed")
    result["verdict"] = None
    if verdict:
        result["verdict"] = verdict.to_dict()
        # The verdict has the largest fraction of all ranks. In modes whose ranks do not wait for
        # each other, rank 0's own fraction may be smaller, but all reports must agree.
        result["data_wait_fraction"] = verdict.step["data"]
    # A resumed run with no step left measured nothing, so the earlier measurements stay.
    if run.timer.seen == 0:
        previous = run.tracker.folder.read("result.json", run.tracker.say)
        kept = {key: previous[key] for key in reporting.KEPT_KEYS if key in previous}
        result |= cast(Result, kept)
    shared: Result = run.world.broadcast_object(result)
    run.tracker.result(shared)
    selected = run.recipe.task.metrics or ()
    metric_names = dict.fromkeys((run.task.metric, *selected, *run.task.metric_names()))
    figures = [f"val_{name}" for name in metric_names]
    figures += [f"best_{run.task.metric}", "train_loss", "samples_per_sec"]
    with presenting.skip_on_error(run.tracker):
        run.tracker.compare(shared, figures)
    lines = lines or reporting.build_last_lines(
        run.resolved, run.state.history, run.observer.memory, shared, run.noticed.announced
    )
    (title, text), *other_lines = lines.items()
    run.tracker.say(format_titled(title, text), GREEN)
    run.tracker.print_lines(dict(other_lines))
    run.tracker.close()
    run.close()
    if run.recipe.logging.wandb or run.recipe.logging.mlflow:
        # Rank 0's loggers may take minutes to upload their last values. So the ranks use
        # `wait_for`, which has a longer timeout than the recipe's.
        run.world.wait_for(None)
    run.world.barrier()
    run.world.close()
    return shared

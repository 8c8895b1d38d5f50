"""Notices what goes wrong in a run: checks the figures of each epoch, and warns once of each problem.

Nothing here waits for a device; what other ranks know has come with the epoch's own exchanges.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from dataclasses import replace

from trainer.data import ImageSet, LabelledSource, TensorSet
from trainer.tasks import Classification
from trainer.telemetry import symptoms
from trainer.telemetry.symptoms import Facts
from trainer.training.evaluation import Sums
from trainer.training.run import Run

LATEST = symptoms.STANDS  # epochs of which the metrics are kept
LONG = 10.0  # seconds: what disturbs a shorter run is told at its end


def note_classes(run: Run, sums: Sums) -> None:
    """What an evaluation has counted of each class, where the task is a classification as we know it."""
    if {"actual", "predicted"} <= sums.whole.keys() and type(run.task).metrics is Classification.metrics:
        counts = {name: sums.whole[name].long().tolist() for name in ("actual", "predicted")}
        run.noticed.classes = [*run.noticed.classes, counts][-2:]


def watch_ranks(run: Run, steps: int, ranks: Sequence[Sequence[float]]) -> None:
    """What each rank took for its part of the last steps, as `RankWatch.add` has it: name one that is slow for long.

    Collective when it comes to that, which all ranks find at the same step: they have the same figures.
    """
    noticed, world = run.noticed, run.world
    slowest = noticed.ranks.add(steps * ranks[0][0], ranks)
    if slowest is None:
        return
    run.tracker.scalars({"speed/slowest_rank_pct": 100 * slowest.behind}, run.state.position.step)
    if (lag := noticed.ranks.named()) is not None:
        where = f"{socket.gethostname()}, {world.device}"
        mine = symptoms.slow_rank(lag, where, run.recipe) if world.rank == lag.rank else ""
        _notice(run, f"rank {lag.rank}", world.broadcast_object("".join(world.gather(mine))))


def _notice(run: Run, kind: str, sentence: str) -> None:
    """Tell at once of what may have passed by the epoch's end, and keep it among the warnings."""
    run.noticed.announced.add(kind)
    run.noticed.lasting[kind] = run.noticed.warnings[kind] = sentence
    run.tracker.print_lines({"warning": sentence})
    run.tracker.journal.notice(f"step {run.state.position.step}: {sentence}")


def tell(run: Run) -> None:
    """A line for each thing that goes wrong and was not told yet."""
    look(run, over=False)
    for kind, sentence in run.noticed.warnings.items():
        if kind not in run.noticed.announced and (kind != "cores" or run.noticed.strain.seconds > LONG):
            run.noticed.announced.add(kind)
            run.tracker.print_lines({"warning": sentence})


def look(run: Run, over: bool) -> None:
    """Note what goes wrong now; what has passed is forgotten."""
    run.noticed.warnings = run.noticed.lasting | symptoms.symptoms(_facts(run, over), run.recipe)


def _facts(run: Run, over: bool) -> Facts:
    recipe, task, history, classes = run.recipe, run.task, run.state.history, run.noticed.classes
    plain = isinstance(task, Classification) and type(task).loss is Classification.loss
    unweighted = plain and recipe.loss.class_weights is None
    facts = Facts(
        over=over,
        step=run.state.position.step - run.state.step_offset,
        steps=run.state.total_steps - run.state.step_offset,
        epoch_steps=run.resolved.steps_per_epoch,
        warmup=round(recipe.schedule.warmup_epochs * run.resolved.steps_per_epoch),
        strain=run.noticed.strain,
        threads=run.world.threads if run.world.device.type == "cpu" else 1,
    )
    if run.datasets.synthetic:  # made-up images teach nothing
        return facts
    facts = replace(
        facts,
        losses=[loss for loss in history.losses if math.isfinite(loss)],
        classes=task.outputs() if unweighted else None,
        names=run.datasets.classes,
        validation=history.latest,
        labelled=isinstance(run.datasets.train, ImageSet | TensorSet | LabelledSource),
    )
    if not classes:
        return facts
    before = classes[0]["predicted"] if len(classes) > 1 else ()
    return replace(facts, actual=classes[-1]["actual"], predicted=classes[-1]["predicted"], before=before)

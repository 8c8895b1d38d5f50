"""Notices what goes wrong in a run: checks the figures of each epoch, and warns once of each problem.

Nothing here waits for a device; what other ranks know has come with the epoch's own exchanges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from trainer.data import ImageSet, LabelledSource, TensorSet
from trainer.devices.strain import Strain
from trainer.tasks import Classification
from trainer.telemetry import symptoms
from trainer.telemetry.symptoms import Facts
from trainer.training.evaluation import Sums
from trainer.training.run import Run

LATEST = symptoms.STANDS  # epochs of which the metrics are kept
SPEED = ("cores", "throttled", "rate")  # kinds that a moment may show and a whole run need not
LONG = 10.0  # seconds: what disturbs a shorter run is told at its end


def note_classes(run: Run, sums: Sums) -> None:
    """What an evaluation has counted of each class, where the task is a classification as we know it."""
    if {"actual", "predicted"} <= sums.whole.keys() and type(run.task).metrics is Classification.metrics:
        counts = {name: sums.whole[name].long().tolist() for name in ("actual", "predicted")}
        run.noticed.classes = [*run.noticed.classes, counts][-2:]


def note_skipped_steps(run: Run, steps: Sequence[int]) -> None:
    """Tell of steps that were skipped as not finite, and remember them; those that are known already are no news."""
    known, allowed = run.history.nonfinite, run.recipe.tolerated
    fresh = sorted({*steps} - {*known})[: max(0, allowed + 1 - len(known))]  # after one too many all are left out
    known += fresh
    if fresh and len(known) <= allowed:
        run.noticed.told.add("not finite")
        text = f"step {', '.join(map(str, fresh))}: a loss or gradient was not finite, so all ranks left it out"
        run.tracker.facts({"warning": f"{text} ({len(known)} of on_nonfinite={run.recipe.on_nonfinite})"})


def worst(strains: Sequence[Strain]) -> Strain:
    """Of all ranks: the slowest holds up the others."""
    most = max(strains, key=lambda strain: strain.others)
    quotas = [strain.quota for strain in strains if strain.quota is not None]
    slow = dict.fromkeys(strain.throttled for strain in strains if strain.throttled)
    return replace(most, quota=min(quotas, default=None), throttled=", ".join(slow))


def tell(run: Run) -> None:
    """A line for each thing that goes wrong and was not told yet."""
    look(run, over=False)
    for kind, sentence in run.noticed.warnings.items():
        if kind not in run.noticed.told and (kind not in SPEED or run.noticed.strain.seconds > LONG):
            run.noticed.told.add(kind)
            run.tracker.facts({"warning": sentence})


def look(run: Run, over: bool) -> None:
    """Note what goes wrong now; what has passed is forgotten."""
    run.noticed.warnings = symptoms.symptoms(_facts(run, over), run.recipe)


def _facts(run: Run, over: bool) -> Facts:
    recipe, task, history, classes = run.recipe, run.task, run.history, run.noticed.classes
    plain = isinstance(task, Classification) and type(task).loss is Classification.loss
    unweighted = plain and recipe.loss.class_weights is None
    facts = Facts(
        over=over,
        step=run.position.step - run.shift,
        steps=run.total_steps - run.shift,
        epoch_steps=run.steps_per_epoch,
        warmup=round(recipe.schedule.warmup_epochs * run.steps_per_epoch),
        throughput=run.timer.summary(run.loader.samples_per_step).throughput,
        strain=run.noticed.strain,
        skipped=run.history.nonfinite,
    )
    if run.datasets.synthetic:  # made-up images teach nothing
        return facts
    facts = replace(
        facts,
        losses=[loss for loss in history.losses if math.isfinite(loss)],  # of an epoch that was left out it is NaN
        classes=task.outputs() if unweighted else None,
        names=run.datasets.classes,
        validation=history.latest,
        labelled=isinstance(run.datasets.train, ImageSet | TensorSet | LabelledSource),
    )
    if not classes:
        return facts
    before = classes[0]["predicted"] if len(classes) > 1 else ()
    return replace(facts, actual=classes[-1]["actual"], predicted=classes[-1]["predicted"], before=before)

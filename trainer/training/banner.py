"""What is about to run, for people: before the first step, and on the run's page in TensorBoard."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence

from trainer.devices import cuda_graphs, precision
from trainer.processes.rank import elastic_advice
from trainer.processes.terminal import BOLD
from trainer.recipe.checks import most_rows
from trainer.recipe.shares import rows_of
from trainer.recipe.versions import VERSION
from trainer.telemetry.readable import columns, counted
from trainer.training.memory_needs import KEPT
from trainer.training.run import Run

# Below 16 images a batch ResNet-50's error on ImageNet grows: by 1 point at 8, 4 at 4, 11 at 2 (Wu and He, "Group
# Normalization", arXiv:1803.08494, table 2).
FEW = 16
WARNINGS = (
    *("torchrun", "skipped", "warning", "batchnorm", "bf16", "left out", "ignored", "labels", "balance", "precision"),
    *("note", "graphs"),
)
DETAILS = ("computes", "mode", "devices", "held out", "cuts", "readers", "folder")
ROOM = 3  # lines beside those that every run has


def say(run: Run) -> None:
    """What is about to run: first what to look at, and where the rest is told.

    In eight lines, and more where what every run has needs them: it is never cut.
    """
    tracker, known, where = run.tracker, run.observer.banner_lines, few_names(run.world.devices)
    head = f"trainer {VERSION}: {run.recipe.name}, {run.recipe.mode} on {where}, {known['computes']}"
    lines = textwrap.wrap(head, columns(80), subsequent_indent=" " * 12)
    tracker.say("\n".join(lines), BOLD)
    always = {title: known[title] for title in ("model", "data", "steps")}
    warnings = [title for title in WARNINGS if title in known]
    titles = [title for title in known if title not in (*warnings, *always, *DETAILS)]
    room = max(1, ROOM + 1 - len(lines) + len(always) - tracker.print_lines(always))
    titles = [*warnings, *titles][:room]
    room -= len(titles)
    for title in titles:
        room -= tracker.print_lines({title: known[title]}, lines=room + 1) - 1
    tracker.print_lines({"details": f"python -m trainer runs show {shlex.quote(str(tracker.path))}"})


def few_names(devices: Sequence[str]) -> str:
    """Devices in a few words: 4 x cuda."""
    kinds = {name.partition(":")[0] for name in devices}
    return f"{len(devices)} x {kinds.pop()}" if len(devices) > 1 == len(kinds) else ", ".join(devices)


def banner_lines(run: Run) -> dict[str, str]:
    """What is about to run, by title."""
    recipe, world, data = run.recipe, run.world, run.datasets
    size, names = world.size, world.devices
    devices = ", ".join(names) if len(names) <= 8 else f"{names[0]} ... {names[-1]}"
    parts = run.strategy.share.count
    part = "worker" if recipe.traits.every_sample else "replica" if parts < size else "device"
    options = [word for word in ("channels_last", "compile", "sync_bn") if getattr(recipe, word)]
    options += [f"recompute {run.strategy.recomputes}"] if run.strategy.recomputes else []
    options += [f"ema {recipe.ema}"] if recipe.ema is not None else []
    options.insert(0, precision.computed_in(recipe.precision, world.device))
    note = precision.note(recipe.precision, world.device)
    local, rows = (most_rows(recipe, parts, pieces) for pieces in (1, recipe.pieces))
    most = " at most" * (parts * recipe.pieces * rows != recipe.batch_size)
    each = run.resolved.steps_per_epoch
    steps = f"{counted(recipe.epochs, 'epoch')} x {counted(each, 'step')}"
    if recipe.max_steps:
        ends = recipe.max_steps <= recipe.epochs * each
        steps += f", {recipe.max_steps} in all at most," if ends else f" (max_steps={recipe.max_steps} is more)"
    steps += f" of {recipe.batch_size} images"
    if (unequal := shares_of(run)) is not None:
        steps += f", {' + '.join(map(str, unequal))} a {part}"
        steps += f", in {recipe.pieces} pieces each" if recipe.pieces > 1 else ""
    else:
        steps += f", {parts} x {local}{most} a {part}" if parts > 1 else ""
        steps += f", in {recipe.pieces} pieces of {rows}{most}" if recipe.pieces > 1 else ""
    if KEPT in run.strategy.tuned:
        steps += " (accumulate=auto)"
        steps += ", each with its own BatchNorm statistics" * (recipe.pieces > 1 and run.observer.model.batch_norm)
    starts = ", ".join(f"{epochs:.4g}" for epochs in recipe.schedule.restarts if epochs < recipe.epochs)
    steps += f"; a new cosine from lr {recipe.peak_lr:g} after epoch {starts}" if starts else ""
    singular, plural = ("value", "values") if run.task.reads == "values" else ("class", "classes")
    outputs = f"{len(data.classes)} {singular if len(data.classes) == 1 else plural}"
    lines = {
        "mode": f"{recipe.mode}, {size} rank{'s' * (size > 1)}, {world.threads} thread{'s' * (world.threads > 1)} each",
        "devices": devices,
        **run.strategy.notes(),
        "model": f"{recipe.model.name} on {' x '.join(map(str, data.inputs.shape))}, "
        f"{run.observer.model.parameters:,} parameters",
        "computes": ", ".join(options),
        **({"precision": note} if note else {}),
        "data": f"{data.name}: {len(data.train):,} training images, {len(data.val):,} held out, {outputs}",
        "held out": data.holdout,
        **({"teacher": run.teacher.note} if run.teacher is not None else {}),
        **run.observer.model.notes,
        **data.notes,
        **({"readers": workers} if (workers := run.loader.workers_in_words()) else {}),
        "steps": steps,
        "folder": str(run.tracker.path),
    }
    if recipe.shares is not None and size == 1:
        lines["shares"] = "one process computes all of every batch"
    if recipe.graphs is True and not cuda_graphs.possible(world.device):
        lines["graphs"] = "only CUDA devices have them: graphs=true changes nothing here"
    if (few := few_for_batch_norm(run)) is not None:
        lines["batchnorm"] = few
    if advice := elastic_advice():
        lines["torchrun"] = advice
    if 0 < recipe.epochs <= recipe.schedule.warmup_epochs:
        lines["warning"] = (
            f"set schedule.warmup_epochs=0: the warm-up is as long as the run, and lr never reaches {recipe.peak_lr:g}"
        )
    return lines


def shares_of(run: Run) -> list[int] | None:
    """Images of a step that each rank computes, where it uses all of its own about as many; None where equal."""
    recipe, share = run.recipe, run.strategy.share
    rows = rows_of(recipe, share.count, numbers=share.numbers)
    return [recipe.pieces * each for each in rows] if share.numbers else None


def few_for_batch_norm(run: Run) -> str | None:
    """What to do where a part of the batch that is normalised by itself is small beside the batch of the recipe."""
    recipe, strategy = run.recipe, run.strategy
    parts = strategy.share.count
    rows = min(rows_of(recipe, parts, numbers=strategy.share.numbers))
    instead = ["a larger batch_size"] + ["a smaller accumulate"] * (recipe.pieces > 1)
    if recipe.sync_bn:
        rows = recipe.batch_size // recipe.pieces
    elif parts > 1 and "sync_bn" not in recipe.traits.refuses:
        instead.insert(0, "sync_bn=true")
    elif recipe.traits.exchanges == "copies" and run.world.device.type == "cuda":
        rows = -(-rows // len(run.world.drives))
        instead.insert(0, "mode=ddp sync_bn=true")
    elif recipe.traits.micro_batches:
        whole, rows = rows, strategy.result_fields()["pipeline"]["split_size"]
        instead = [f"pipeline.microbatches={whole // FEW} or fewer"] * (whole >= 2 * FEW) + instead
    if not run.observer.model.batch_norm or rows >= FEW or rows == recipe.batch_size:
        return None
    return (
        f"try {', '.join(instead)}: mean and variance are over {rows} image{'s' * (rows > 1)} at a time, and below "
        f"{FEW} they are too rough, so accuracy suffers and losses differ from mode=single. Or use a model without "
        "BatchNorm (cnn_gn, vit_tiny, vit_b_16, convnext_tiny)"
    )

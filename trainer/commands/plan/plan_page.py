"""A plan for people: a compact page, like the banner of a run."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from trainer.commands.plan.run_plan import (
    BatchFigures,
    DataFigures,
    ModeFigures,
    ModelFigures,
    PipelineFigures,
    PredictionFigures,
    RateFigures,
    ReadingFigures,
    RunPlan,
    StepFigures,
)
from trainer.recipe import TRAITS
from trainer.recipe.versions import VERSION
from trainer.telemetry import readable
from trainer.telemetry.readable import as_size, duration, multiply_adds, operations

WIDTH = 119
PARTS = ("parameters", "gradients", "optimizer", "ema", "buffers", "images", "activations", "peak")


def page_of(plan: RunPlan) -> str:
    """The page."""
    lines = [f"trainer {VERSION}: plan of {plan.recipe}"]
    size, devices, disk = plan.world_size, plan.devices, plan.disk
    facts = {
        "mode": f"{plan.mode}, {size} process{'es' * (size > 1)} on {len(devices)} device"
        + f"{'s' * (len(devices) > 1)}: {_devices(devices)}",
        "model": _model(plan.model),
        "data": _data(plan.data),
        "batch": _batch(plan.batch),
        "steps": _steps(plan.steps, plan.learning_rate),
        **_wider(plan.batch, len(devices)),
        "disk": f"{as_size(disk.checkpoint)} a checkpoint, {as_size(disk.folder)} at most for the run folder",
        "traffic": _traffic(plan),
        **_reading(plan.reading),
    }
    for key, value in facts.items():
        lines += _field(key, value)
    lines += ["", *_memory(plan)]
    if plan.pipeline:
        lines += ["", *_pipeline(plan.pipeline)]
    if plan.prediction:
        lines += ["", *_prediction(plan.prediction)]
    if plan.modes:
        lines += ["", *_modes(plan.modes)]
    if plan.assumptions:
        lines += ["", "  assumed"]
        for note in plan.assumptions:
            lines += wrap(note, WIDTH, initial_indent="    - ", subsequent_indent="      ")
    short = plan.fits is False and plan.memory_limit is not None
    how = f", with {plan.advice[0].words} or another of the words above" if short and plan.advice else ""
    lines += ["", f"  to train{how}" + (" (it does not fit here as it is)" if short else "")]
    lines += [f"    {command}" for command in plan.commands]
    if plan.needs_folder:
        lines.append("    FOLDER holds train/<class> and val/<class>; without data.root= only the speed is measured")
    return "\n".join(lines)


def _field(key: str, value: str) -> list[str]:
    return wrap(value, WIDTH, initial_indent=f"  {key:<9}", subsequent_indent=" " * 11)


def _devices(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} ... {names[-1]}"


def _model(model: ModelFigures) -> str:
    count = model.forward_flops_per_image
    work = f"{multiply_adds(count)} ({operations(count)}) per image, forward"
    return f"{model.name}, {model.parameters:,} parameters, {work}, {model.precision}"


def _data(data: DataFigures) -> str:
    shape = f"{data.classes} classes, {data.channels} x {data.image_size} x {data.image_size}"
    if data.train_samples is None:
        return f"{data.name}: number of images unknown ({data.source}); {shape}"
    return f"{data.name}: {data.train_samples:,} training images, {data.val_samples:,} held out; {shape}"


def _batch(batch: BatchFigures) -> str:
    line = f"{batch.whole} global"
    if batch.shards > 1:
        line += f" = {batch.shards} x {batch.per_shard}"
        line += " at most" * (batch.shards * batch.per_shard > batch.whole)
    if batch.accumulate > 1:
        line += f", in {batch.accumulate} pieces of {batch.per_pass}"
    if batch.microbatch not in (None, batch.per_pass):
        line += f", in micro-batches of {batch.microbatch}"
    return line + (f"; {batch.per_device:.4g} images a device" if batch.microbatch is None else "")


def _wider(batch: BatchFigures, cards: int) -> dict[str, str]:
    if batch.wider is None:
        return {}
    few = f"{batch.whole} images on {cards} cards are {batch.per_device:.4g} per card, too few to keep it busy"
    return {"small": f"{few}: try {batch.wider} (different maths, so different accuracy)"}


def _steps(steps: StepFigures, rate: RateFigures) -> str:
    count = "unknown"
    if steps.per_epoch is not None:
        count = f"{steps.per_epoch:,} an epoch x {steps.epochs} epochs, {steps.total:,} in all"
    line = f"{count}; lr {rate.highest:g} {rate.schedule}"
    line += f", warm-up of {rate.warmup_epochs:g} epochs" if rate.warmup_epochs else ""
    line += f" (first {rate.first:.3g}, last {rate.last:.3g})" if rate.first is not None else ""
    return line + ("; fewer where stop.patience ends it" if steps.patience is not None else "")


def _reading(reading: ReadingFigures | None) -> dict[str, str]:
    if reading is None:
        return {}
    names = ("reading", "decoding", "transforming")
    spent = (reading.read_seconds, reading.decode_seconds, reading.transform_seconds)
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in zip(names, spent, strict=True))
    many = reading.processes > 1
    line = f"{reading.samples_per_sec:,.4g} images/s by {reading.processes} process{'es' * many} of this machine"
    line += f" ({parts} a photo)"
    if reading.bound is not None:
        line += f": at that speed the {reading.bound} limits the run"
    return {"reading": line}


def _traffic(plan: RunPlan) -> str:
    traffic, exchanges = plan.communication, TRAITS[plan.mode].exchanges
    parts = []
    if traffic.all_reduce_bytes_per_device:
        what = "gather weights and reduce gradients" if exchanges == "shards" else f"all-reduce {exchanges}"
        parts.append(f"{as_size(traffic.all_reduce_bytes_per_device)} a step sent by each device to {what}")
    if traffic.epoch_bytes_per_device:
        parts.append(f"{as_size(traffic.epoch_bytes_per_device)} an epoch sent by each device to average weights")
    if traffic.crossing_bytes:
        what = "copies and gradients" if exchanges == "copies" else "activations and their gradients"
        parts.append(f"{as_size(traffic.crossing_bytes)} a step of {what} from device to device")
    line = "; ".join(parts) or "none between devices"
    return line + (f"; {duration(traffic.seconds)} if nothing overlaps it" if parts and traffic.seconds else "")


def _memory(plan: RunPlan) -> list[str]:
    groups: dict[tuple[int, ...], list[str]] = {}  # devices that hold the same
    for device in plan.memory_per_device:
        groups.setdefault(tuple(getattr(device, key) for key in PARTS), []).append(device.device)
    shown = [n for n in range(len(PARTS)) if any(sizes[n] for sizes in groups)]
    rows = [["memory", *(PARTS[n] for n in shown)]]
    rows += [[_devices(names), *(as_size(sizes[n]) for n in shown)] for sizes, names in groups.items()]
    lines = _table(rows)
    if plan.graphs is not None:
        stays, moment = as_size(plan.graphs.stays), as_size(plan.graphs.moment)
        text = f"{stays} more stay for recorded steps, up to {moment} more are needed once, to compare these with "
        lines += _field("graphs", text + "launched ones; without that room, steps are launched")
    limit = plan.memory_limit
    if limit is None:
        return [*lines, "  this machine has no such device: add memory=24GiB to see whether this fits"]
    used_of = f"{as_size(plan.peak)} of {as_size(limit.bytes)} ({limit.source})"
    if plan.fits:
        cuda = plan.devices[0].startswith("cuda")
        what = "CUDA's context, NCCL's buffers and holes between blocks" if cuda else "what a plan cannot count"
        return [*lines, f"  fits: {used_of}", f"    {as_size(limit.bytes - limit.usable)} are kept free for {what}"]
    lines.append(f"  DOES NOT FIT: {used_of}, of which {as_size(limit.usable)} can be used")
    lines += [f"    {advice.words:<28} {as_size(advice.peak):>10}  {advice.note}" for advice in plan.advice]
    if not plan.advice:
        lines.append("    no change to the recipe makes it fit: use more devices or a smaller model")
    return lines


def _pipeline(pipe: PipelineFigures) -> list[str]:
    by = {"flops": "balanced by FLOPs, nothing is measured", "seconds": "balanced by measured seconds"}
    title = f"{len(pipe.stages)} stages, {pipe.schedule}"
    title += f", {pipe.microbatches} micro-batches" if pipe.microbatches > 1 else ""
    lines = [f"  pipeline {title}; {by.get(pipe.balanced_by, 'as given')}"]
    rows = [["stage", "device", "cut after", "parameters", "forward", "share", "sends"]]
    for index, stage in enumerate(pipe.stages):
        cut = pipe.cuts[index] if index < len(pipe.cuts) else ""
        sent = f"{as_size(stage.sent_bytes)}" if cut else ""
        numbers = [f"{stage.parameters:,}", operations(stage.forward_flops), f"{stage.flops_share:.0%}", sent]
        rows.append([str(index), stage.device, cut, *numbers])
    lines += _table(rows)
    if not pipe.bubbles:
        return lines
    counts = sorted({row.microbatches for row in pipe.bubbles})
    rows = [["ideal bubble", *(f"m={m}" for m in counts), "in flight at most"]]
    for schedule in dict.fromkeys(row.schedule for row in pipe.bubbles):
        by_count = {row.microbatches: row for row in pipe.bubbles if row.schedule == schedule}
        cells = [f"{by_count[m].bubble:.1%}" if m in by_count else "-" for m in counts]
        rows.append([schedule, *cells, str(max(row.in_flight for row in by_count.values()))])
    return [*lines, *_table(rows)]


def _prediction(made: PredictionFigures) -> list[str]:
    names = ("compute" if made.bubble is None else "stages", "communication", "optimizer", "other")
    parts = (made.compute_seconds, made.communication_seconds, made.optimizer_seconds, made.other_seconds)
    listed = ", ".join(f"{key} {duration(seconds)}" for key, seconds in zip(names, parts, strict=True) if seconds)
    line = f"{made.samples_per_sec:,.4g} images/s, {duration(made.step_seconds)} a step: {listed}"
    line += f"; bubble {made.bubble:.1%}" if made.bubble is not None else ""
    return _field("predicts", line)


def _modes(modes: Sequence[ModeFigures]) -> list[str]:
    rows = [["mode", "processes", "devices", "activations", "peak a device", "fits", "sent a step", "bubble"]]
    errors = []
    for row in modes:
        if row.activations is None or row.peak is None:
            errors.append(f"    {row.mode}: {row.error}")
            continue
        fits = {True: "yes", False: "no", None: "?"}[row.fits]
        sizes = [as_size(row.activations), as_size(row.peak)]
        sent = as_size(row.traffic) if row.traffic else "-"
        bubble = f"{row.bubble:.0%}" if row.bubble is not None else "-"
        rows.append([row.mode, str(row.world_size), str(row.devices), *sizes, fits, sent, bubble])
    return [*_table(rows), *errors]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left and the others to the right."""
    return [f"  {line}" for line in readable.table(rows, right=range(1, len(rows[0])))]

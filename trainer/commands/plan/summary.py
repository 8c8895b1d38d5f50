"""The content of a plan as one tree of plain values.

`plan` returns it and `plan --json` prints it; its keys are stable. Sizes are in bytes and times in
seconds. None means that a value is unknown, was not requested, or does not apply to the mode.
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trainer.commands.plan import forecast, memory_keys, speed_probe
from trainer.commands.plan.dataset_facts import DatasetFacts, read_dataset_facts
from trainer.commands.plan.fake_model import Cut, FakeModel
from trainer.commands.plan.planned_layout import lay_out_modes
from trainer.data import DataShare, count_steps_per_epoch
from trainer.devices import cards
from trainer.errors import RecipeError
from trainer.memory.prediction import assess, disk, fullest, on_host
from trainer.models.blocks import count_parameters
from trainer.optim.optimization import count_total_steps
from trainer.processes.torch_context import plain_context
from trainer.recipe import Recipe, format_arguments
from trainer.recipe.checks import count_largest_rows, explain_eager_steps
from trainer.recipe.known_names import OWN_PHOTOS
from trainer.recipe.layout import Layout
from trainer.telemetry.readable import format_size

Plan = dict[str, Any]


@plain_context()
def summarize(
    layout: Layout,
    nproc: int | str | None,
    memory: int | None,
    measured: str | None,
    bandwidth: float | None,
    plugin: str | None,
    every: bool,
    words: Sequence[str],
) -> Plan:
    """Compute the whole content of a plan.

    Args:
        layout: processes and devices.
        nproc: number of processes that the user asks for; None if not stated.
        memory: memory of each device in bytes; None if not stated.
        measured: "here" to measure on this machine; None to measure nothing.
        bandwidth: bytes per second between devices; None if not stated.
        plugin: the user's own module, or None.
        every: whether to add a row for each mode.
        words: arguments of the command line, for the commands that the plan shows.

    Returns:
        The plan; see `trainer.commands.plan.plan`.
    """
    is_auto = layout.recipe.accumulate == "auto"
    images = read_dataset_facts(layout.recipe)
    fake, layout = memory_keys.choose_recompute(FakeModel(layout, images), layout, memory)
    layout = memory_keys.choose_accumulate(fake, layout, memory)
    recipe = layout.recipe
    steps = None
    total = None
    if images.train is not None:
        share = DataShare(0, layout.data_shares, every_sample=recipe.traits.every_sample)
        steps = count_steps_per_epoch(images.train, recipe, share)
        total = count_total_steps(recipe, steps)
    cut = None
    prediction = None
    assumptions = _list_assumptions(fake, layout, images, is_auto)
    if measured:
        timings = speed_probe.measure_here(layout, images, plugin)
        predicted = forecast.forecast(fake, layout, timings, bandwidth)
        cut = predicted.cut
        prediction = predicted.figures(recipe.batch_size)
        assumptions += predicted.assumptions
    # A forecast has chosen the cut already. Without a forecast, the cut is chosen here.
    if layout.staged and cut is None:
        cut = fake.cut(layout)
    devices, limit, fits = assess(fake, layout, memory, cut)
    modes = None
    if every:
        # accumulate=auto is resolved for each mode separately.
        typed = recipe.replace(accumulate="auto") if is_auto else recipe
        layouts = lay_out_modes(typed, nproc, layout.kind == "cuda")
        modes = [_plan_mode(fake, mode, planned, memory) for mode, planned in layouts.items()]
    # BatchNorm refuses a single value per channel, so count the FLOPs of two images and halve them.
    flops = fake.forward_flops(2) // 2
    advice = []
    if limit is not None and not fits:
        advice = memory_keys.suggest_arguments(fake, layout, limit.bytes)
    return {
        "recipe": recipe.name,
        "mode": recipe.mode,
        "world_size": layout.processes,
        "devices": list(layout.devices),
        "model": {
            "name": recipe.model.name,
            "parameters": count_parameters(fake.model),
            "forward_flops_per_image": flops,
            "precision": recipe.precision,
        },
        "data": {
            "name": recipe.data.name,
            "train_samples": images.train,
            "val_samples": images.val,
            "classes": images.classes,
            "channels": images.channels,
            "image_size": images.size,
            "source": images.note,
        },
        "batch": {
            "global": recipe.batch_size,
            "shards": layout.data_shares,
            "per_shard": count_largest_rows(recipe, layout.data_shares, 1),
            "shares": layout.shares and [recipe.pieces * rows for rows in layout.shares],
            "per_device": recipe.batch_size / len(layout.devices),
            "accumulate": recipe.pieces,
            "per_pass": layout.rows,
            "microbatch": cut and cut.rows,
        },
        "steps": {"per_epoch": steps, "epochs": recipe.epochs, "total": total},
        "memory_per_device": list(map(asdict, devices)),
        "memory_limit": limit and asdict(limit),
        "peak": fullest(devices),
        "peak_without_recompute": memory_keys.predict_peak_without_recompute(fake, layout, cut),
        "fits": fits,
        "advice": advice,
        "pipeline": cut and _summarize_stages(fake, layout, cut),
        "communication": _summarize_traffic(fake, layout, cut, bandwidth),
        "disk": disk(fake, layout),
        "prediction": prediction,
        "predicted_samples_per_sec": prediction and prediction["samples_per_sec"],
        "commands": list_commands(recipe, layout, words),
        "needs_folder": needs_folder(recipe),
        "assumptions": assumptions,
        "modes": modes,
    }


def _summarize_stages(fake: FakeModel, layout: Layout, cut: Cut) -> Plan:
    total_flops = sum(stage.flops for stage in cut.stages)
    stages = []
    modules = fake.traced.stages(cut.names)
    for module, stage, holder in zip(modules, cut.stages, cut.holders, strict=True):
        stages.append(
            {
                "device": layout.devices[holder],
                "parameters": count_parameters(module),
                "forward_flops": stage.flops,
                "flops_share": stage.flops / total_flops,
                "sent_bytes": stage.sent,
            }
        )
    # The outputs of the last stage go to the loss and are not sent.
    stages[-1]["sent_bytes"] = 0
    return {
        "schedule": layout.schedule,
        "microbatches": cut.microbatches,
        "rows": cut.rows,
        "cuts": list(cut.names),
        "balanced_by": cut.balanced_by,
        "stages": stages,
        "bubble_ideal": None if layout.recipe.traits.one_stage_at_a_time else cut.ideal,
    }


def _summarize_traffic(
    fake: FakeModel, layout: Layout, cut: Cut | None, bandwidth: float | None
) -> Plan:
    """Summarize the traffic of a step, with its duration if the user has stated a bandwidth."""
    recipe = layout.recipe
    traffic = forecast.compute_traffic(fake, layout, cut)
    seconds = None
    if bandwidth is not None:
        seconds = (traffic.reduced + traffic.crossing) / bandwidth
    return {
        "all_reduce_bytes_per_device": round(traffic.reduced),
        "crossing_bytes": round(traffic.crossing),
        "every_steps": recipe.local_sgd.every if recipe.traits.exchanges == "weights" else 1,
        "epoch_bytes_per_device": round(traffic.averaged),
        "seconds": seconds,
    }


def needs_folder(recipe: Recipe) -> bool:
    """Return whether training needs a folder of images that the arguments do not name yet.

    Without this folder, a run fails or, with data.missing=synthetic, only measures its speed on
    synthetic images.
    """
    return recipe.data.name in OWN_PHOTOS and recipe.data.root is None


def list_commands(recipe: Recipe, layout: Layout, words: Sequence[str]) -> list[str]:
    """Return the command lines that start the planned run.

    The first line uses our launcher. For several processes, the second line uses torchrun.
    """
    arguments = list(words) or format_arguments(recipe)
    if needs_folder(recipe):
        arguments.append("data.root=FOLDER")
    base = "-m trainer " + shlex.join(arguments)
    if layout.processes > 1:
        return [
            f"python {base} nproc={layout.processes}",
            f"torchrun --standalone --nproc_per_node={layout.processes} {base}",
        ]
    if recipe.processes == "many":
        base += " nproc=1"
    return [f"python {base}"]


def _list_assumptions(
    fake: FakeModel, layout: Layout, images: DatasetFacts, is_auto: bool
) -> list[str]:
    """List what the numbers of the plan assume, in sentences for the page."""
    recipe = layout.recipe
    notes = []
    if is_auto:
        notes.append(
            f"accumulate=auto is {recipe.pieces} here; a run tries it and counts the memory that "
            "is free then"
        )
    if layout.staged and recipe.pipeline.cuts == "auto":
        notes.append(
            "stages are balanced by FLOPs; training measures blocks on its devices and may cut "
            "elsewhere"
        )
    if layout.staged and len(layout.microbatches) > 1:
        notes.append("pipeline.microbatches=auto tries several numbers when training starts")
    host_bytes = on_host(fake, layout)
    if host_bytes:
        notes.append(
            f"fsdp.offload: each rank keeps {format_size(host_bytes)} in host memory, pinned for "
            "the weights"
        )
    if layout.kind == "cuda" and explain_eager_steps(recipe, layout.processes) is None:
        notes.append(
            "CUDA graphs keep a batch's images twice; if that does not fit, steps run eagerly"
        )
    if fake.teacher:
        notes.append(
            "the teacher's pass costs time, and memory in addition to its weights or shards, that "
            "are not counted"
        )
    if recipe.shares == "auto" and layout.processes > 1:
        notes.append(
            "shares=auto measures ranks as they train, and assigns more images to fast ones than "
            "shown here"
        )
    if recipe.compile:
        notes.append("compiled operators may keep less than these activations")
    if layout.kind == "cpu" and recipe.devices == "auto" and not recipe.traits.shared_memory:
        notes.append(
            "no GPU is here, so this is for CPU devices; a GPU holds as much: memory=24GiB plans "
            "for its size"
        )
    if layout.kind == "cuda" and not cards.detect().count:
        notes.append("without a GPU here, activations are those of the CPU's operators")
    if images.train is None:
        notes.append(f"training images are not counted: {images.note}")
    return notes


def _plan_mode(
    fake: FakeModel, mode: str, layout: Layout | RecipeError, memory: int | None
) -> Plan:
    """Return the row of one mode; if the mode cannot run on these devices, `error` says why.

    Peak and activations are the largest of all devices. Traffic is the number of bytes that one
    device sends in a step to exchange gradients, shards or weights, plus the bytes that all devices
    send between stages or as copies of the model. The bubble is the fraction of a step in which
    stages wait if all of them take equally long.
    """
    keys = ("world_size", "devices", "peak", "activations", "fits", "traffic", "bubble", "error")
    row = {"mode": mode, **dict.fromkeys(keys)}
    try:
        if isinstance(layout, RecipeError):
            raise layout
        # A mode with recomputation needs a model of its own: `FakeModel` wraps the recomputed
        # blocks of most modes, but not in modes with stages, which are traced without wrappers.
        if layout.recipe.recompute:
            fake = FakeModel(layout, fake.images)
        layout = memory_keys.choose_accumulate(fake, layout, memory)
        cut = fake.cut(layout) if layout.staged else None
        devices, _, fits = assess(fake, layout, memory, cut)
    except RecipeError as error:
        return {**row, "error": str(error)}
    traffic = forecast.compute_traffic(fake, layout, cut)
    if cut:
        row["bubble"] = cut.ideal
        if layout.recipe.traits.one_stage_at_a_time:
            row["bubble"] = 1 - 1 / layout.workers
    return row | {
        "world_size": layout.processes,
        "devices": len(layout.devices),
        "peak": fullest(devices),
        "activations": max(device.activations for device in devices),
        "fits": fits,
        "traffic": round(traffic.reduced) + round(traffic.crossing),
    }

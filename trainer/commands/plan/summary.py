"""A plan as one tree of plain values: what is known of a layout before it runs.

It is what `plan` returns and `plan --json` prints; its keys are stable. Sizes are bytes, times seconds, None is what is
not known.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trainer.commands.plan import forecast, planned_memory, speed_probe
from trainer.commands.plan.dataset_facts import DatasetFacts, dataset_facts
from trainer.commands.plan.fake_model import Cut, FakeModel
from trainer.commands.plan.planned_layout import Layout, every_mode
from trainer.data import DataShare, steps_per_epoch
from trainer.devices import cards
from trainer.errors import RecipeError
from trainer.optim.optimization import total_steps
from trainer.recipe import Recipe, words_of
from trainer.recipe.checks import launched_because, most_rows
from trainer.recipe.known_names import OWN_PHOTOS
from trainer.telemetry.readable import as_size

Plan = dict[str, Any]


def summarise(
    layout: Layout,
    nproc: int | str | None,
    room: int | None,
    measured: str | None,
    bandwidth: float | None,
    plugin: str | None,
    every: bool,
    words: Sequence[str],
) -> Plan:
    """Everything that is known of the layout before it runs; see `trainer.commands.plan.plan`."""
    auto, images = layout.recipe.accumulate == "auto", dataset_facts(layout.recipe)
    fake, layout = planned_memory.with_recompute(FakeModel(layout.recipe, images, layout.kind), layout, room)
    layout = planned_memory.in_pieces(fake, layout, room)
    recipe = layout.recipe
    steps = total = None
    if images.train is not None:
        steps = steps_per_epoch(
            images.train, recipe, DataShare(0, layout.data_shares, every_sample=recipe.traits.every_sample)
        )
        total = total_steps(recipe, steps)
    predicted = cut = None
    if measured is not None:
        predicted = forecast.forecast(fake, layout, speed_probe.here(layout, images, plugin), bandwidth)
        cut = predicted.cut
    if layout.staged and cut is None:
        cut = fake.cut(layout)
    devices = planned_memory.footprint(fake, layout, cut)
    limit = planned_memory.limit(devices, layout, room)
    fits = planned_memory.fits(devices, limit)
    modes = (
        every_mode(recipe.replace(accumulate="auto") if auto else recipe, nproc, layout.kind == "cuda") if every else {}
    )
    prediction = None if predicted is None else predicted.figures(recipe.batch_size)
    return {
        "recipe": recipe.name,
        "mode": recipe.mode,
        "world_size": layout.processes,
        "devices": list(layout.devices),
        "model": {
            "name": recipe.model.name,
            "parameters": fake.size,
            "forward_flops_per_image": fake.forward_flops(2) // 2,  # of two: BatchNorm may see one value of one
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
            "per_shard": most_rows(recipe, layout.data_shares, 1),
            "shares": layout.shares and [recipe.pieces * rows for rows in layout.shares],
            "per_device": recipe.batch_size / len(layout.devices),
            "accumulate": recipe.pieces,
            "per_pass": layout.rows,
            "microbatch": None if cut is None else cut.rows,
        },
        "steps": {"per_epoch": steps, "epochs": recipe.epochs, "total": total},
        "memory_per_device": [asdict(device) for device in devices],
        "memory_limit": None if limit is None else asdict(limit),
        "peak": planned_memory.fullest(devices),
        "peak_without_recompute": planned_memory.without_recompute(fake, layout, cut),
        "fits": fits,
        "advice": planned_memory.advice(fake, layout, limit.bytes) if limit is not None and not fits else [],
        "pipeline": None if cut is None else _stages(fake, layout, cut),
        "communication": _communication(fake, layout, cut, bandwidth),
        "disk": planned_memory.disk(fake, layout),
        "prediction": prediction,
        "predicted_samples_per_sec": None if prediction is None else prediction["samples_per_sec"],
        "commands": commands(recipe, layout, words),
        "needs_folder": needs_folder(recipe),
        "assumptions": [*_assumptions(fake, layout, images, auto), *(predicted.assumptions if predicted else ())],
        "modes": [_mode(fake, mode, laid_out, room) for mode, laid_out in modes.items()] if every else None,
    }


def _stages(fake: FakeModel, layout: Layout, cut: Cut) -> Plan:
    modules = fake.traced.stages(cut.names)
    return {
        "schedule": layout.schedule,
        "microbatches": cut.microbatches,
        "rows": cut.rows,
        "cuts": list(cut.names),
        "balanced_by": cut.balanced_by,
        "stages": [
            {
                "device": layout.devices[holder],
                "parameters": sum(p.numel() for p in module.parameters()),
                "forward_flops": stage.flops,
                "flops_share": stage.flops / sum(other.flops for other in cut.stages),
                "sent_bytes": stage.sent if index + 1 < len(cut.stages) else 0,
            }
            for index, (module, stage, holder) in enumerate(zip(modules, cut.stages, cut.holders, strict=True))
        ],
        "bubble_ideal": None if layout.recipe.traits.one_stage_at_a_time else cut.ideal,
    }


def _communication(fake: FakeModel, layout: Layout, cut: Cut | None, bandwidth: float | None) -> Plan:
    """What goes between devices in a step, and what that takes at a stated bandwidth."""
    recipe, sent = layout.recipe, forecast.traffic(fake, layout, cut)
    return {
        "all_reduce_bytes_per_device": round(sent.reduced),
        "crossing_bytes": round(sent.crossing),
        "every_steps": recipe.local_sgd.every if recipe.traits.exchanges == "weights" else 1,
        "epoch_bytes_per_device": round(sent.averaged),
        "seconds": None if bandwidth is None else (sent.reduced + sent.crossing) / bandwidth,
    }


def needs_folder(recipe: Recipe) -> bool:
    """Whether training needs images that the words do not name yet; it would measure its speed on others."""
    return recipe.data.name in OWN_PHOTOS and recipe.data.root is None


def commands(recipe: Recipe, layout: Layout, words: Sequence[str]) -> list[str]:
    """What to type: with a launcher of ours, and under torchrun where there are several processes."""
    typed = list(words) or words_of(recipe)
    if needs_folder(recipe):
        typed.append("data.root=FOLDER")
    base = "-m trainer " + shlex.join(typed)
    if layout.processes == 1:
        return [f"python {base}" + " nproc=1" * (recipe.processes == "many")]
    return [f"python {base} nproc={layout.processes}", f"torchrun --nproc_per_node={layout.processes} {base}"]


def _assumptions(fake: FakeModel, layout: Layout, images: DatasetFacts, auto: bool) -> list[str]:
    """What the figures rest on."""
    recipe, notes = layout.recipe, []
    if auto:
        notes.append(f"accumulate=auto takes {recipe.pieces} here; a run tries it and counts what memory is free then")
    if layout.staged and recipe.pipeline.cuts == "auto":
        notes.append("stages are balanced by FLOPs; training measures blocks on its devices and may cut elsewhere")
    if layout.staged and len(layout.microbatches) > 1:
        notes.append("pipeline.microbatches=auto tries several numbers when training starts")
    if host := planned_memory.on_host(fake, layout):
        notes.append(f"fsdp.offload: each rank keeps {as_size(host)} in the host's memory, pinned where weights are")
    if layout.kind == "cuda" and launched_because(recipe, layout.processes) is None:
        notes.append("recorded steps keep a batch's images twice; where that does not fit, steps are launched")
    if fake.teacher:
        notes.append("the teacher's pass takes time, and memory beside its weights or shards, that are not counted")
    if recipe.shares == "auto" and layout.processes > 1:
        notes.append("shares=auto measures ranks as they train, and gives fast ones more images than these")
    if recipe.compile:
        notes.append("compiled operators may keep less than these activations")
    if layout.kind == "cpu" and recipe.devices == "auto" and not recipe.traits.shared_memory:
        notes.append("no GPU is here, so this is for CPU devices; a GPU holds as much: memory=24GiB asks for its size")
    if layout.kind == "cuda" and not cards.detect().count:
        notes.append("without a GPU here, activations are those of the CPU's operators")
    if images.train is None:
        notes.append(f"training images are not counted: {images.note}")
    return notes


def _mode(fake: FakeModel, mode: str, layout: Layout | RecipeError, room: int | None) -> Plan:
    """A mode on as many devices: bytes on the fullest one, bytes sent by a device in a step (all that cross, where the
    model is in stages or copied), the ideal share of a step in which stages wait; or why it cannot be."""
    keys = ("world_size", "devices", "peak", "activations", "fits", "traffic", "bubble", "error")
    row: Plan = {"mode": mode, **dict.fromkeys(keys)}
    try:
        if isinstance(layout, RecipeError):
            raise layout
        if layout.recipe.recompute:  # stages are traced as they are, and other modes run blocks that are wrapped
            fake = FakeModel(layout.recipe, fake.images, layout.kind)
        layout = planned_memory.in_pieces(fake, layout, room)
        cut = fake.cut(layout) if layout.staged else None
        devices = planned_memory.footprint(fake, layout, cut)
    except RecipeError as error:
        return {**row, "error": str(error)}
    sent, in_turn = forecast.traffic(fake, layout, cut), layout.recipe.traits.one_stage_at_a_time
    return row | {
        "world_size": layout.processes,
        "devices": len(layout.devices),
        "peak": planned_memory.fullest(devices),
        "activations": max(device.activations for device in devices),
        "fits": planned_memory.fits(devices, planned_memory.limit(devices, layout, room)),
        "traffic": round(sent.reduced) + round(sent.crossing),
        "bubble": None if cut is None else 1 - 1 / layout.workers if in_turn else cut.ideal,
    }

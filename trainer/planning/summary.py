"""A plan as one tree of plain values: what `plan` returns and --json prints. Its keys are stable."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from trainer.data import Shard, steps_per_epoch
from trainer.devices import cards
from trainer.errors import RecipeError
from trainer.planning import forecast, memory, probe, schedules
from trainer.planning.dataset_facts import DatasetFacts, dataset_facts
from trainer.planning.forecast import Forecast
from trainer.planning.layout import Layout, every_mode
from trainer.planning.measured import from_run, ring
from trainer.planning.schedules import Cut
from trainer.planning.shadow import Shadow
from trainer.recipe import Recipe, words_of
from trainer.recipe.checks import wider_batch
from trainer.training.optimization import learning_rate, total_steps


def summarise(
    layout: Layout,
    nproc: int | str | None,
    room: int | None,
    measured: str | None,
    bandwidth: float | None,
    plugin: str | None,
    every: bool,
    words: Sequence[str],
) -> dict[str, Any]:
    """Everything that is known of the layout before it runs; see `trainer.planning.plan`."""
    recipe = layout.recipe
    images = dataset_facts(recipe)
    shard = Shard(0, layout.shards, every_sample=recipe.traits.every_sample)
    steps = None if images.train is None else steps_per_epoch(images.train, recipe, shard)
    shadow = Shadow(recipe, images, layout.kind)
    source = predicted = cut = None
    if measured is not None:
        source = probe.here(layout, images, plugin) if measured == "here" else from_run(measured, recipe, images)
        predicted = forecast.forecast(shadow, layout, source, bandwidth)
        cut = predicted.cut
    if layout.staged and cut is None:
        cut = schedules.cut(shadow, layout)
    return {
        "recipe": recipe.name,
        "mode": recipe.mode,
        "world_size": layout.processes,
        "devices": list(layout.devices),
        "model": {
            "name": recipe.model.name,
            "parameters": shadow.size,
            "forward_flops_per_image": shadow.forward_flops(1),
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
            "shards": layout.shards,
            "per_shard": recipe.batch_size // layout.shards,
            "per_device": recipe.batch_size / len(layout.devices),
            "accumulate": recipe.accumulate,
            "per_pass": layout.rows,
            "microbatch": None if cut is None else cut.rows,
            "wider": wider_batch(recipe, len(layout.devices), images.train) if layout.kind == "cuda" else None,
        },
        "steps": {
            "per_epoch": steps,
            "epochs": recipe.epochs,
            "total": None if steps is None else total_steps(recipe, steps),
        },
        "learning_rate": _rates(recipe, steps),
        **_memory(shadow, layout, cut, room),
        "pipeline": None if cut is None else _stages(shadow, layout, cut),
        "communication": _communication(shadow, layout, cut, bandwidth),
        "disk": memory.disk(shadow, layout),
        "prediction": None if predicted is None else _prediction(recipe, predicted),
        "scaling": [] if source is None else forecast.over_device_counts(shadow, layout, source, bandwidth),
        "predicted_samples_per_sec": None if predicted is None else recipe.batch_size / predicted.step,
        "commands": commands(recipe, layout, words),
        "needs_folder": needs_folder(recipe),
        "assumptions": [*_assumptions(layout, images), *(predicted.assumptions if predicted is not None else ())],
        "modes": _modes(shadow, recipe, nproc, room) if every else None,
    }


def _rates(recipe: Recipe, steps: int | None) -> dict[str, Any]:
    """The learning rate at its highest and, where the number of steps is known, at the first and the last."""
    schedule = recipe.schedule
    known: dict[str, Any] = {
        "schedule": schedule.name,
        "warmup_epochs": schedule.warmup_epochs,
        "highest": recipe.optimizer.lr,
        "first": None,
        "last": None,
    }
    if steps is not None:
        rate = learning_rate(recipe, steps)
        known |= {"first": rate(0), "last": rate(total_steps(recipe, steps) - 1)}
    return known


def _memory(shadow: Shadow, layout: Layout, cut: Cut | None, room: int | None) -> dict[str, Any]:
    """Bytes on each device, whether they fit, and what to change."""
    devices = memory.footprint(shadow, layout, cut)
    own = (room, "as stated") if room is not None else memory.own_memory(layout, len(devices))
    fits = None if own is None else memory.fits(devices, own[0])
    return {
        "memory_per_device": [device.to_dict() for device in devices],
        "memory_limit": None if own is None else {"bytes": own[0], "usable": memory.USABLE * own[0], "source": own[1]},
        "peak": memory.fullest(devices),
        "fits": fits,
        "advice": memory.advice(shadow, layout, own[0]) if own is not None and fits is False else [],
    }


def _stages(shadow: Shadow, layout: Layout, cut: Cut) -> dict[str, Any]:
    """Cuts, stages and bubbles."""
    modules = shadow.traced.stages(cut.names)
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
                "flops_share": stage.flops / sum(one.flops for one in cut.stages),
                "sent_bytes": stage.sent if index + 1 < len(cut.stages) else 0,
            }
            for index, (module, stage, holder) in enumerate(zip(modules, cut.stages, cut.holders, strict=True))
        ],
        "bubble_ideal": None if layout.recipe.traits.one_stage_at_a_time else cut.ideal,
        "bubbles": schedules.bubbles(layout) if layout.recipe.traits.micro_batches else [],
    }


def _communication(shadow: Shadow, layout: Layout, cut: Cut | None, bandwidth: float | None) -> dict[str, Any]:
    """Bytes that go between devices in a step, and what that takes at a stated bandwidth."""
    recipe, count, exchanges = layout.recipe, layout.processes, layout.recipe.traits.exchanges
    own = shadow.resident(shadow.model)
    reduced = crossing = 0.0
    if exchanges == "gradients":
        reduced = ring(count) * own["gradients"]
    elif exchanges == "weights" and count > 1:
        every = recipe.local_sgd.every
        reduced = ring(count) * (own["parameters"] + own["buffers"]) / every if every else 0.0
    elif exchanges == "copies" and layout.kind == "cuda":  # the first device sends copies and gets gradients
        crossing = (len(layout.devices) - 1) * (own["parameters"] + own["gradients"]) * recipe.accumulate
    if cut is not None:
        passes = cut.microbatches * recipe.accumulate
        crossing = 2.0 * passes * sum(stage.sent for stage in cut.stages[:-1])
        if layout.shards > 1:
            modules = shadow.traced.stages(cut.names)
            held = cut.of_workers([shadow.resident(module)["gradients"] for module in modules])
            reduced = ring(layout.shards) * max(held)
    total = reduced + crossing
    return {
        "all_reduce_bytes_per_device": round(reduced),
        "crossing_bytes": round(crossing),
        "every_steps": recipe.local_sgd.every if exchanges == "weights" else 1,
        "epoch_bytes_per_device": round(ring(count) * (own["parameters"] + own["buffers"]))
        if exchanges == "weights"
        else 0,
        "seconds": None if bandwidth is None else total / bandwidth,
    }


def _prediction(recipe: Recipe, predicted: Forecast) -> dict[str, Any]:
    return {
        "step_seconds": predicted.step,
        "compute_seconds": predicted.compute,
        "communication_seconds": predicted.communication,
        "optimizer_seconds": predicted.optimizer,
        "other_seconds": predicted.other,
        "bubble": predicted.bubble,
        "samples_per_sec": recipe.batch_size / predicted.step,
    }


def needs_folder(recipe: Recipe) -> bool:
    """Whether training needs images that the words do not name yet; it would measure its speed on others."""
    return recipe.data.name == "imagefolder" and recipe.data.root is None


def commands(recipe: Recipe, layout: Layout, words: Sequence[str]) -> list[str]:
    """What to type: with a launcher of ours, and under torchrun where there are several processes."""
    typed = list(words) or words_of(recipe)
    if needs_folder(recipe):
        typed.append("data.root=FOLDER")
    base = "-m trainer " + shlex.join(typed)
    if layout.processes == 1:
        return [f"python {base}" + " nproc=1" * (recipe.processes == "many")]
    return [f"python {base} nproc={layout.processes}", f"torchrun --nproc_per_node={layout.processes} {base}"]


def _assumptions(layout: Layout, images: DatasetFacts) -> list[str]:
    """What the figures rest on."""
    recipe, notes = layout.recipe, []
    if layout.staged and recipe.pipeline.cuts == "auto":
        notes.append("stages are balanced by FLOPs; training measures blocks on its devices and may cut elsewhere")
    if layout.staged and len(layout.microbatches) > 1:
        notes.append("pipeline.microbatches=auto tries several numbers when training starts")
    if recipe.compile:
        notes.append("compiled operators may keep less than these activations")
    if layout.kind == "cpu" and recipe.devices == "auto" and not recipe.traits.shared_memory:
        notes.append("no GPU is here, so this is for CPU devices; a GPU holds as much: memory=24GiB asks for its size")
    if layout.kind == "cuda" and not cards.look().count:
        notes.append("no GPU is here to ask: activations are those of the CPU's operators")
    if images.train is None:
        notes.append(f"training images are not counted: {images.note}")
    return notes


def _modes(shadow: Shadow, recipe: Recipe, nproc: int | str | None, room: int | None) -> list[dict[str, Any]]:
    """Each mode on as many devices: the fullest device's bytes, and whether they fit; or why it cannot be."""
    return [_mode(shadow, mode, layout, room) for mode, layout in every_mode(recipe, nproc).items()]


def _mode(shadow: Shadow, mode: str, layout: Layout | RecipeError, room: int | None) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(("world_size", "devices", "peak", "activations", "fits", "error"))
    try:
        if isinstance(layout, RecipeError):
            raise layout
        devices = memory.footprint(shadow, layout)
    except RecipeError as error:
        return {"mode": mode, **row, "error": str(error)}
    own = room if room is not None else (memory.own_memory(layout, len(devices)) or (None,))[0]
    row |= {"world_size": layout.processes, "devices": len(layout.devices)}
    row |= {"peak": memory.fullest(devices), "activations": max(device.activations for device in devices)}
    return {"mode": mode, **row, "fits": None if own is None else memory.fits(devices, own)}

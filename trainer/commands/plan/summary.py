"""A plan as one tree of plain values: what is known of a layout before it runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from trainer.commands.plan import forecast, planned_memory, schedules, speed_probe
from trainer.commands.plan.dataset_facts import DatasetFacts, dataset_facts
from trainer.commands.plan.fake_model import FakeModel
from trainer.commands.plan.measured import gradients_sent, reading, ring, sharded_traffic
from trainer.commands.plan.planned_layout import Layout, every_mode
from trainer.commands.plan.run_plan import (
    BatchFigures,
    DataFigures,
    ModeFigures,
    ModelFigures,
    PipelineFigures,
    RateFigures,
    RunPlan,
    StageFigures,
    StepFigures,
    TrafficFigures,
)
from trainer.commands.plan.schedules import Cut
from trainer.data import Shard, steps_per_epoch
from trainer.devices import cards
from trainer.errors import RecipeError
from trainer.modes.fsdp_units import unit_sizes, units_of
from trainer.optim.optimization import learning_rate, total_steps
from trainer.recipe import Recipe, words_of
from trainer.recipe.checks import most_rows, refused_schedules, wider_batch
from trainer.recipe.known_names import OWN_PHOTOS
from trainer.telemetry.readable import as_size

MOST = 0.5  # of the weights in one unit of fsdp: with more in one, sharding gains little


def summarise(
    layout: Layout,
    nproc: int | str | None,
    room: int | None,
    measured: str | None,
    bandwidth: float | None,
    plugin: str | None,
    every: bool,
    words: Sequence[str],
) -> RunPlan:
    """Everything that is known of the layout before it runs; see `trainer.commands.plan.plan`."""
    recipe = layout.recipe
    images = dataset_facts(recipe)
    steps = _steps(layout, images)
    fake = FakeModel(recipe, images, layout.kind)
    predicted = cut = None
    if measured is not None:
        predicted = forecast.forecast(fake, layout, speed_probe.here(layout, images, plugin), bandwidth)
        cut = predicted.cut
    speed = None if predicted is None else recipe.batch_size / predicted.step
    if layout.staged and cut is None:
        cut = schedules.cut(fake, layout)
    devices = planned_memory.footprint(fake, layout, cut)
    limit = planned_memory.limit(devices, layout, room)
    fits = None if limit is None else planned_memory.fits(devices, limit.bytes, layout)
    return RunPlan(
        recipe=recipe.name,
        mode=recipe.mode,
        world_size=layout.processes,
        devices=list(layout.devices),
        model=ModelFigures(recipe.model.name, fake.size, fake.forward_flops(1), recipe.precision),
        data=DataFigures(
            recipe.data.name, images.train, images.val, images.classes, images.channels, images.size, images.note
        ),
        batch=_batch(layout, images, cut),
        steps=steps,
        learning_rate=_rates(recipe, steps.per_epoch),
        memory_per_device=devices,
        graphs=planned_memory.graphs(layout, devices),
        memory_limit=limit,
        peak=planned_memory.fullest(devices),
        fits=fits,
        advice=planned_memory.advice(fake, layout, limit.bytes) if limit is not None and fits is False else [],
        pipeline=None if cut is None else _stages(fake, layout, cut),
        communication=_communication(fake, layout, cut, bandwidth),
        disk=planned_memory.disk(fake, layout),
        reading=reading(recipe, images, layout.shards, speed),
        prediction=None if predicted is None else predicted.figures(recipe.batch_size),
        predicted_samples_per_sec=speed,
        commands=commands(recipe, layout, words),
        needs_folder=needs_folder(recipe),
        assumptions=[*_assumptions(fake, layout, images, room), *(predicted.assumptions if predicted else ())],
        modes=[
            _mode(fake, mode, laid_out, room)
            for mode, laid_out in every_mode(recipe, nproc, layout.kind == "cuda").items()
        ]
        if every
        else None,
    )


def _batch(layout: Layout, images: DatasetFacts, cut: Cut | None) -> BatchFigures:
    """The global batch, and what of it each shard, device, pass and micro-batch has."""
    recipe = layout.recipe
    return BatchFigures(
        whole=recipe.batch_size,
        shards=layout.shards,
        per_shard=most_rows(recipe, layout.shards, 1),
        per_device=recipe.batch_size / len(layout.devices),
        accumulate=recipe.accumulate,
        per_pass=layout.rows,
        microbatch=None if cut is None else cut.rows,
        wider=wider_batch(recipe, len(layout.devices), images.train) if layout.kind == "cuda" else None,
    )


def _steps(layout: Layout, images: DatasetFacts) -> StepFigures:
    recipe = layout.recipe
    shard = Shard(0, layout.shards, every_sample=recipe.traits.every_sample)
    steps = None if images.train is None else steps_per_epoch(images.train, recipe, shard)
    total = None if steps is None else total_steps(recipe, steps)
    return StepFigures(steps, recipe.epochs, total, recipe.stop.patience)


def _rates(recipe: Recipe, steps: int | None) -> RateFigures:
    """The learning rate at its highest and, where the number of steps is known, at the first and the last."""
    schedule = recipe.schedule
    first = last = None
    if steps is not None:
        rate = learning_rate(recipe, steps)
        first, last = rate(0), rate(total_steps(recipe, steps) - 1)
    return RateFigures(schedule.name, schedule.warmup_epochs, recipe.peak_lr, first, last)


def _stages(fake: FakeModel, layout: Layout, cut: Cut) -> PipelineFigures:
    """Cuts, stages and bubbles."""
    modules = fake.traced.stages(cut.names)
    return PipelineFigures(
        schedule=layout.schedule,
        microbatches=cut.microbatches,
        rows=cut.rows,
        cuts=list(cut.names),
        balanced_by=cut.balanced_by,
        stages=[
            StageFigures(
                device=layout.devices[holder],
                parameters=sum(p.numel() for p in module.parameters()),
                forward_flops=stage.flops,
                flops_share=stage.flops / sum(other.flops for other in cut.stages),
                sent_bytes=stage.sent if index + 1 < len(cut.stages) else 0,
            )
            for index, (module, stage, holder) in enumerate(zip(modules, cut.stages, cut.holders, strict=True))
        ],
        bubble_ideal=None if layout.recipe.traits.one_stage_at_a_time else cut.ideal,
        bubbles=schedules.bubbles(layout) if layout.recipe.traits.micro_batches else [],
    )


def _communication(fake: FakeModel, layout: Layout, cut: Cut | None, bandwidth: float | None) -> TrafficFigures:
    """Bytes that go between devices in a step, and what that takes at a stated bandwidth."""
    recipe, count, exchanges = layout.recipe, layout.processes, layout.recipe.traits.exchanges
    resident = fake.resident(fake.model)
    reduced = averaged = crossing = 0.0
    if exchanges == "gradients":
        reduced = ring(count) * gradients_sent(recipe, resident.gradients)
    elif exchanges == "shards":
        reduced = sharded_traffic(recipe, count, resident.parameters)
    elif exchanges == "weights":
        averaged = ring(count) * (resident.gradients + resident.buffers)
        reduced = averaged / recipe.local_sgd.every if recipe.local_sgd.every else 0.0
    elif exchanges == "copies" and layout.kind == "cuda":  # the first device sends copies and gets gradients
        crossing = (len(layout.devices) - 1) * (resident.parameters + resident.gradients) * recipe.accumulate
    if cut is not None:
        passes = cut.microbatches * recipe.accumulate
        crossing = 2.0 * passes * sum(stage.sent for stage in cut.stages[:-1])
        if layout.shards > 1:
            modules = fake.traced.stages(cut.names)
            held = cut.of_workers([fake.resident(module).gradients for module in modules])
            reduced = ring(layout.shards) * max(held)
    total = reduced + crossing
    return TrafficFigures(
        all_reduce_bytes_per_device=round(reduced),
        crossing_bytes=round(crossing),
        every_steps=recipe.local_sgd.every if exchanges == "weights" else 1,
        epoch_bytes_per_device=round(averaged),
        seconds=None if bandwidth is None else total / bandwidth,
    )


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


def _sharding(fake: FakeModel, layout: Layout, room: int | None) -> list[str]:
    """Whether sharding gains much, and whether it is needed."""
    units = units_of(fake.model)
    sizes = dict(zip(["what belongs to no block", *units], unit_sizes(fake.model, units), strict=True))
    largest = max(sizes, key=lambda name: sizes[name])
    share = sizes[largest] / max(1, sum(sizes.values()))
    notes = [f"fsdp gathers {largest} in one piece, {share:.0%} of the weights" + ": it gains little" * (share > MOST)]
    ddp = Layout(layout.recipe.replace(mode="ddp"), layout.processes, layout.devices)
    devices = planned_memory.footprint(fake, ddp, None)
    memory, peak = planned_memory.limit(devices, ddp, room), as_size(planned_memory.fullest(devices))
    if memory is None:
        return [*notes, f"mode=ddp would hold {peak} on each device: take it where that fits"]
    if not planned_memory.fits(devices, memory.bytes, ddp):
        return [*notes, f"mode=ddp would hold {peak} on each device, which does not fit"]
    sent, reduced = (_communication(fake, each, None, None).all_reduce_bytes_per_device for each in (layout, ddp))
    less = f", and sends {as_size(reduced)} a step where fsdp sends {as_size(sent)}" if reduced < sent else ""
    return [*notes, f"mode=ddp fits too, with {peak} on each device{less}"]


def _assumptions(fake: FakeModel, layout: Layout, images: DatasetFacts, room: int | None) -> list[str]:
    """What the figures rest on."""
    recipe, notes = layout.recipe, []
    if recipe.traits.exchanges == "shards" and layout.processes > 1:
        notes += _sharding(fake, layout, room)
    if layout.staged and recipe.pipeline.cuts == "auto":
        notes.append("stages are balanced by FLOPs; training measures blocks on its devices and may cut elsewhere")
    if layout.staged and len(layout.microbatches) > 1:
        notes.append("pipeline.microbatches=auto tries several numbers when training starts")
    if recipe.traits.micro_batches and (refused := refused_schedules()):
        notes.append(f"{', '.join(refused)} are left out: the installed torch cannot run them")
    if host := planned_memory.on_host(fake, layout):
        notes.append(f"fsdp.offload: each rank keeps {as_size(host)} in the host's memory, pinned where weights are")
    if recipe.compile:
        notes.append("compiled operators may keep less than these activations")
    if layout.kind == "cpu" and recipe.devices == "auto" and not recipe.traits.shared_memory:
        notes.append("no GPU is here, so this is for CPU devices; a GPU holds as much: memory=24GiB asks for its size")
    if layout.kind == "cuda" and not cards.detect().count:
        notes.append("without a GPU here, activations are those of the CPU's operators")
    if images.train is None:
        notes.append(f"training images are not counted: {images.note}")
    return notes


def _mode(fake: FakeModel, mode: str, layout: Layout | RecipeError, room: int | None) -> ModeFigures:
    """A mode on as many devices: the fullest device's bytes, and whether they fit; or why it cannot be."""
    try:
        if isinstance(layout, RecipeError):
            raise layout
        cut = schedules.cut(fake, layout) if layout.staged else None
        devices = planned_memory.footprint(fake, layout, cut)
    except RecipeError as error:
        return ModeFigures(mode, error=str(error))
    memory = room if room is not None else (planned_memory.own_memory(layout, len(devices)) or (None,))[0]
    traffic, in_turn = _communication(fake, layout, cut, None), layout.recipe.traits.one_stage_at_a_time
    return ModeFigures(
        mode,
        world_size=layout.processes,
        devices=len(layout.devices),
        peak=planned_memory.fullest(devices),
        activations=max(device.activations for device in devices),
        fits=None if memory is None else planned_memory.fits(devices, memory, layout),
        traffic=traffic.all_reduce_bytes_per_device + traffic.crossing_bytes,
        bubble=None if cut is None else 1 - 1 / layout.workers if in_turn else cut.ideal,
    )

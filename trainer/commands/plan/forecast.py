"""What devices would send each other in a step, and how long it would take, from what was measured of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from trainer.commands.plan.fake_model import Cut, FakeModel
from trainer.commands.plan.planned_layout import Layout
from trainer.errors import RecipeError
from trainer.models.balance import BlockCost, stage_seconds
from trainer.modes.fsdp_units import teacher_share
from trainer.modes.pipeline import tuning
from trainer.modes.pipeline.torch_schedules import step_and_bubble
from trainer.recipe import STREAMS
from trainer.recipe.checks import weight_shards
from trainer.telemetry.readable import as_size, duration

BACKWARD = 2 / 3  # of a pass, where the two were not measured apart; an all-reduce can hide behind it on a GPU


class Traffic(NamedTuple):
    """Bytes."""

    reduced: float = 0.0  # that each device sends in a step, to reduce gradients, gather shards or average weights
    averaged: float = 0.0  # that it sends in an epoch, to average weights
    crossing: float = 0.0  # of all devices in a step: activations between stages, or copies of the model


def candidates(layout: Layout) -> list[int]:
    """The numbers of micro-batches that training would measure."""
    stages, counts = layout.workers * layout.virtual, tuple(layout.microbatches)
    return tuning.counts_to_try(tuning.Pipe(layout.workers, ((layout.schedule, stages),), layout.rows, counts))


def ring(ranks: int) -> float:
    """How often each rank sends a tensor's bytes in a ring all-reduce (Patarasuk and Yuan, 2009)."""
    return 2 * (ranks - 1) / ranks


def traffic(fake: FakeModel, layout: Layout, cut: Cut | None) -> Traffic:
    """Of the layout; `cut` for a model in stages."""
    recipe, count, resident = layout.recipe, layout.processes, fake.resident(fake.model)
    if cut is not None:
        crossing = 2.0 * cut.microbatches * recipe.pieces * sum(stage.sent for stage in cut.stages[:-1])
        return Traffic(ring(layout.data_shares) * max(cut.gradients), crossing=crossing)
    match recipe.traits.exchanges:
        case "gradients":
            return Traffic(ring(count) * resident.gradients / (2 if recipe.ddp.compress else 1))
        case "shards":
            parts = weight_shards(recipe, count)
            passes = (2 + recipe.fsdp.reshard) * recipe.pieces  # weights forward, weights backward, gradients
            taught = (fake.teacher - teacher_share(fake.teacher, resident.parameters, parts)) * recipe.pieces
            return Traffic(resident.parameters * (passes * (parts - 1) / parts + ring(count // parts) / parts) + taught)
        case "weights":
            averaged, every = ring(count) * (resident.gradients + resident.buffers), recipe.local_sgd.every
            return Traffic(averaged / every if every else 0.0, averaged)
        case "copies" if layout.kind == "cuda":  # the first device sends copies and gets gradients
            each = (resident.parameters + resident.gradients) * recipe.pieces
            return Traffic(crossing=float((len(layout.devices) - 1) * each))
    return Traffic()


@dataclass(frozen=True)
class Timings:
    """Speeds of one device."""

    image: float  # seconds of an image's forward and backward pass
    rows: int  # images of a pass in which that was measured
    optimizer: float = 0.0  # seconds of the optimizer's part of a step, of the whole model
    other: float = 0.0  # seconds of a step that are neither: waiting for images, logging
    # seconds of each block between neighbouring cuts, by the images of a micro-batch
    blocks: Mapping[int, list[BlockCost]] = field(default_factory=dict)
    bandwidth: float | None = None  # bytes a second between two devices; None where it was not measured
    latency: float = 0.0  # seconds before the first byte
    assumptions: tuple[str, ...] = ()  # for people


@dataclass(frozen=True)
class Forecast:
    """A predicted step: seconds of its parts, which follow each other, and how it came about."""

    compute: float
    communication: float
    optimizer: float
    other: float
    bubble: float | None = None
    cut: Cut | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def step(self) -> float:
        return self.compute + self.communication + self.optimizer + self.other

    def figures(self, batch_size: int) -> dict[str, float | None]:
        parts = ("step", "compute", "communication", "optimizer", "other")
        seconds = {f"{part}_seconds": getattr(self, part) for part in parts}
        return {**seconds, "bubble": self.bubble, "samples_per_sec": batch_size / self.step}


def forecast(fake: FakeModel, layout: Layout, measured: Timings, bandwidth: float | None) -> Forecast:
    """A step of the layout, with the `bandwidth` that was stated, else the measured one. Raises RecipeError."""
    recipe = layout.recipe
    if recipe.traits.exchanges == "copies" and layout.kind == "cuda":
        raise RecipeError(
            f"measured= cannot predict mode={recipe.mode}, which copies the model in every pass: plan mode=ddp"
        )
    if bandwidth is not None:
        notes = (*measured.assumptions, f"devices exchange {as_size(bandwidth)}/s, as stated")
        measured = replace(measured, bandwidth=bandwidth, assumptions=notes)
    if not layout.staged:
        return _of_replicas(fake, layout, measured)
    # Of the numbers of micro-batches that were measured the fastest, as training would choose.
    return min((_of_cut(fake, layout, measured, m) for m in candidates(layout)), key=lambda f: f.step)


def _of_replicas(fake: FakeModel, layout: Layout, measured: Timings) -> Forecast:
    notes = list(measured.assumptions)
    if layout.rows != measured.rows:
        notes.append(f"an image takes as long in passes of {layout.rows} as in passes of {measured.rows}")
    compute = measured.image * layout.rows * layout.recipe.pieces
    seconds, how = _exchange(fake, layout, measured)
    notes += [how] * bool(how)
    hidden = 0.0
    reduced = layout.recipe.traits.exchanges == "gradients" and seconds
    if reduced and layout.kind == "cuda":
        hidden = min(seconds, BACKWARD * measured.image * layout.rows)  # only the last micro-batch's pass exchanges
        notes.append(f"{duration(hidden)} of {duration(seconds)} of all-reduce overlap with the backward pass")
    elif reduced:
        notes.append("the all-reduce overlaps with nothing: on CPUs the same cores do both")
    return Forecast(compute, seconds - hidden, measured.optimizer, measured.other, assumptions=tuple(notes))


def _exchange(fake: FakeModel, layout: Layout, measured: Timings) -> tuple[float, str]:
    """Seconds a step in which ranks exchange gradients, or weights, and how that is known."""
    count, exchanges = layout.processes, layout.recipe.traits.exchanges
    if count == 1 or exchanges not in ("gradients", "shards", "weights"):
        return 0.0, ""
    every = layout.recipe.local_sgd.every if exchanges == "weights" else 1
    if every is None:
        return 0.0, "the cost of averaging once an epoch is neglected"
    if measured.bandwidth is None:
        return 0.0, "communication is left out: state it, as in bandwidth=10GB/s"
    sent = traffic(fake, layout, None).reduced
    seconds = sent / measured.bandwidth
    if exchanges == "shards":
        return seconds, f"{as_size(sent)} of weights and gradients a step, none of it overlapped"
    seconds += 2 * (count - 1) * measured.latency / every
    return seconds, f"a ring all-reduce among {count}, in which each sends {as_size(sent)} a step"


def _of_cut(fake: FakeModel, layout: Layout, measured: Timings, microbatches: int) -> Forecast:
    recipe, rows = layout.recipe, -(-layout.rows // microbatches)
    cut = fake.cut(layout, microbatches, measured.blocks[rows])
    stages = stage_seconds(fake.traced, cut.names, measured.blocks[rows])
    notes = [*measured.assumptions, f"each block's seconds were measured in micro-batches of {rows}"]
    if recipe.recompute:
        stages = [(forward, backward + forward) for forward, backward in stages]
    crossing = max((stage.sent for stage in cut.stages[:-1]), default=0)
    transfer = exchange = 0.0
    if measured.bandwidth is not None:
        transfer = measured.latency + crossing / measured.bandwidth
        exchange = traffic(fake, layout, cut).reduced / measured.bandwidth
        notes.append(f"a micro-batch's {as_size(crossing)} take {duration(transfer)} from stage to stage")
    elif layout.processes > 1:
        notes.append("transfers between stages are left out: state bandwidth=10GB/s")
    if recipe.traits.one_stage_at_a_time or (layout.schedule == STREAMS and layout.kind == "cpu"):
        length, bubble = cut.microbatches * sum(map(sum, stages)), 1 - 1 / layout.workers
        notes.append("one stage works at a time")
    else:
        length, bubble = step_and_bubble(layout.schedule, layout.workers, cut.microbatches, stages, transfer)
    of_optimizer = max(cut.gradients) / sum(cut.gradients) if layout.processes > 1 else 1.0
    compute, update = length * recipe.pieces, measured.optimizer * of_optimizer
    return Forecast(compute, exchange, update, measured.other, bubble, cut, tuple(notes))

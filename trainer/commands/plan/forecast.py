"""How long a step would take, from what was measured of its parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.commands.plan import schedules
from trainer.commands.plan.fake_model import FakeModel
from trainer.commands.plan.measured import Timings, gradients_sent, ring, sharded_traffic
from trainer.commands.plan.planned_layout import Layout
from trainer.commands.plan.run_plan import PredictionFigures
from trainer.commands.plan.schedules import Cut
from trainer.errors import RecipeError
from trainer.models.balance import stage_seconds
from trainer.modes.pipeline.torch_schedules import step_and_bubble
from trainer.recipe import STREAMS
from trainer.telemetry.readable import as_size, duration

BACKWARD = 2 / 3  # of a pass, where the two were not measured apart; an all-reduce can hide behind it on a GPU


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

    def figures(self, batch_size: int) -> PredictionFigures:
        parts = self.compute, self.communication, self.optimizer, self.other
        return PredictionFigures(self.step, *parts, self.bubble, batch_size / self.step)


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
    return _of_stages(fake, layout, measured) if layout.staged else _of_replicas(fake, layout, measured)


def _of_replicas(fake: FakeModel, layout: Layout, measured: Timings) -> Forecast:
    notes = list(measured.assumptions)
    if layout.rows != measured.rows:
        notes.append(f"an image takes as long in passes of {layout.rows} as in passes of {measured.rows}")
    compute = measured.image * layout.rows * layout.recipe.accumulate
    seconds, how = _all_reduce(fake, layout, measured)
    if how:
        notes.append(how)
    hidden = 0.0
    reduced = layout.recipe.traits.exchanges == "gradients" and seconds
    if reduced and layout.kind == "cuda":
        hidden = min(seconds, BACKWARD * measured.image * layout.rows)  # only the last micro-batch's pass exchanges
        notes.append(f"{duration(hidden)} of {duration(seconds)} of all-reduce overlap with the backward pass")
    elif reduced:
        notes.append("the all-reduce overlaps with nothing: on CPUs the same cores do both")
    return Forecast(compute, seconds - hidden, measured.optimizer, measured.other, assumptions=tuple(notes))


def _all_reduce(fake: FakeModel, layout: Layout, measured: Timings) -> tuple[float, str]:
    """Seconds a step in which ranks exchange gradients, or weights, and how that is known."""
    count, exchanges = layout.processes, layout.recipe.traits.exchanges
    if count == 1 or exchanges not in ("gradients", "shards", "weights"):
        return 0.0, ""
    if exchanges == "shards":
        size = sharded_traffic(layout.recipe, count, fake.resident(fake.model).parameters)
        if measured.bandwidth is None:
            return 0.0, "communication is left out: state it, as in bandwidth=10GB/s"
        return size / measured.bandwidth, f"{as_size(size)} of weights and gradients a step, none of it overlapped"
    per_step = 1.0
    if exchanges == "weights":
        every = layout.recipe.local_sgd.every
        if every is None:
            return 0.0, "the cost of averaging once an epoch is neglected"
        per_step = 1 / every
    size = gradients_sent(layout.recipe, fake.resident(fake.model).gradients)
    if measured.bandwidth is None:
        return 0.0, "communication is left out: state it, as in bandwidth=10GB/s"
    seconds = ring(count) * size / measured.bandwidth + 2 * (count - 1) * measured.latency
    return seconds * per_step, f"a ring all-reduce of {as_size(size)} among {count}"


def _of_stages(fake: FakeModel, layout: Layout, measured: Timings) -> Forecast:
    """Of the numbers of micro-batches that were measured the fastest, as training would choose."""
    return min((_of_cut(fake, layout, measured, m) for m in schedules.candidates(layout)), key=lambda f: f.step)


def _of_cut(fake: FakeModel, layout: Layout, measured: Timings, microbatches: int) -> Forecast:
    rows = -(-layout.rows // microbatches)
    cut = schedules.cut(fake, layout, microbatches, measured.blocks[rows])
    stages = stage_seconds(fake.traced, cut.names, measured.blocks[rows])
    notes = [*measured.assumptions, f"each block's seconds were measured in micro-batches of {rows}"]
    recipe = layout.recipe
    if recipe.pipeline.recompute:
        stages = [(forward, backward + forward) for forward, backward in stages]
    crossing = max((stage.sent for stage in cut.stages[:-1]), default=0)
    transfer = 0.0
    if measured.bandwidth is not None:
        transfer = measured.latency + crossing / measured.bandwidth
        notes.append(f"a micro-batch's {as_size(crossing)} take {duration(transfer)} from stage to stage")
    elif layout.processes > 1:
        notes.append("transfers between stages are left out: state bandwidth=10GB/s")
    one_at_a_time = recipe.traits.one_stage_at_a_time or (layout.schedule == STREAMS and layout.kind == "cpu")
    if one_at_a_time:
        length = cut.microbatches * sum(map(sum, stages))
        bubble = 1 - 1 / layout.workers
        notes.append("one stage works at a time")
    else:
        length, bubble = step_and_bubble(layout.schedule, layout.workers, cut.microbatches, stages, transfer)
    exchange = 0.0
    held = cut.of_workers([fake.resident(stage).gradients for stage in fake.traced.stages(cut.names)])
    if layout.shards > 1 and measured.bandwidth is not None:
        exchange = ring(layout.shards) * max(held) / measured.bandwidth
    of_optimizer = max(held) / sum(held) if layout.processes > 1 else 1.0
    compute, update = length * recipe.accumulate, measured.optimizer * of_optimizer
    return Forecast(compute, exchange, update, measured.other, bubble, cut, tuple(notes))

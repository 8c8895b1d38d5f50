"""How long a step would take, from what was measured of its parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.commands.plan import schedules
from trainer.commands.plan.fake_model import FakeModel
from trainer.commands.plan.planned_layout import Layout
from trainer.commands.plan.schedules import Cut
from trainer.commands.plan.speed_probe import Timings
from trainer.commands.plan.traffic import traffic
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
    return min((_of_cut(fake, layout, measured, m) for m in schedules.candidates(layout)), key=lambda f: f.step)


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
    cut = schedules.cut(fake, layout, microbatches, measured.blocks[rows])
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

"""Pipelines before they run: in which order each rank would work, what it would hold meanwhile, where to cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.commands.plan.fake_model import FakeModel, StagePass
from trainer.commands.plan.planned_layout import Layout
from trainer.commands.plan.run_plan import BubbleFigures
from trainer.errors import RecipeError
from trainer.models.balance import BlockCost, cuts_for
from trainer.modes.pipeline import orders, tuning
from trainer.modes.pipeline.orders import Action
from trainer.modes.pipeline.torch_schedules import SCHEDULES, pipeline_order, ranks_of_stages, step_and_bubble
from trainer.modes.pipeline.tuning import Pipe
from trainer.recipe.checks import VIRTUAL

MICROBATCHES = 4  # for each worker, where the recipe leaves the number open: its bubble is 20 % or less


@dataclass(frozen=True)
class Cut:
    """A model in stages."""

    names: tuple[str, ...]  # of the cuts
    microbatches: int  # into which a shard's batch goes
    rows: int  # images of one, of the largest where they differ
    holders: tuple[int, ...]  # which worker holds each stage
    stages: tuple[StagePass, ...]  # each stage's pass of a micro-batch
    ideal: float  # bubble of equal stages
    balanced_by: str  # what made the cuts: recipe, flops or seconds

    def of_workers(self, values: Sequence[int]) -> list[int]:
        """Sums of the stages' values, worker by worker."""
        pairs = list(zip(self.holders, values, strict=True))
        return [sum(v for holder, v in pairs if holder == worker) for worker in range(max(self.holders) + 1)]


def cut(fake: FakeModel, layout: Layout, microbatches: int | None = None, costs: Sequence[BlockCost] = ()) -> Cut:
    """Cut the recipe's model as it says, or where the slowest stage is fastest, by `costs` of each block or its FLOPs.
    Raises RecipeError."""
    if microbatches is None:
        microbatches = default_microbatches(layout)
    rows = -(-layout.rows // microbatches)
    stages, wanted = layout.workers * layout.virtual, layout.recipe.pipeline.cuts
    names = cuts_for(fake.traced, wanted, stages, costs or fake.blocks(rows))
    wired = layout.staged and layout.processes > 1
    return Cut(
        names,
        microbatches,
        rows,
        tuple(ranks_of_stages(layout.schedule, layout.workers, layout.virtual)),
        tuple(fake.stages(names, rows, wired)),
        orders.ideal_bubble(layout.workers, microbatches, layout.virtual),
        "recipe" if layout.recipe.pipeline.cuts != "auto" else "seconds" if costs else "flops",
    )


def candidates(layout: Layout) -> list[int]:
    """The numbers of micro-batches that training would measure."""
    stages, counts = layout.workers * layout.virtual, tuple(layout.microbatches)
    return tuning.counts_to_try(Pipe(layout.workers, ((layout.schedule, stages),), layout.rows, counts))


def default_microbatches(layout: Layout) -> int:
    """The recipe's number of micro-batches, or of those that can be one near four a worker."""
    wanted = MICROBATCHES * layout.workers
    return min(layout.microbatches, key=lambda m: (abs(m - wanted), m))


def in_flight(actions: Sequence[Action]) -> int:
    """Most micro-batches that a worker has begun and not finished, over all its stages."""
    live = most = 0
    for action in actions:
        live += {"F": 1, "I": 0}.get(action.kind, -1)
        most = max(most, live)
    return most


def bubbles(layout: Layout) -> list[BubbleFigures]:
    """The ideal bubble of each schedule over as many processes, for the numbers of micro-batches that it may have."""
    workers = layout.workers
    rows: list[BubbleFigures] = []
    for schedule in SCHEDULES:
        virtual = VIRTUAL.get(schedule, 1)
        chosen = layout.recipe.replace(pipeline__schedule=schedule, pipeline__virtual_stages=None)
        processes = max(2, layout.processes if layout.processes > 1 else workers)
        for microbatches in [workers, 2 * workers, 4 * workers, 8 * workers]:
            try:
                fixed = chosen.replace(pipeline__microbatches=microbatches, pipeline__split_size=None)
                possible = Layout(fixed, processes, layout.devices).microbatches
            except RecipeError:
                continue
            listed = pipeline_order(schedule, workers, virtual, possible[0])
            bubble = step_and_bubble(schedule, workers, possible[0], [(1.0, 2.0)] * (workers * virtual))[1]
            rows.append(BubbleFigures(schedule, microbatches, bubble, max(map(in_flight, listed))))
    return rows

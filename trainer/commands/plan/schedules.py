"""Pipelines before they run: into how many micro-batches a batch would go, and where the model would be cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.commands.plan.fake_model import FakeModel, StagePass
from trainer.commands.plan.planned_layout import Layout
from trainer.models.balance import BlockCost, cuts_for
from trainer.modes.pipeline import orders, tuning
from trainer.modes.pipeline.torch_schedules import ranks_of_stages
from trainer.modes.pipeline.tuning import Pipe

MICROBATCHES = 4  # for each worker, where the recipe leaves the number open: its bubble is 20 % or less


@dataclass(frozen=True)
class Cut:
    """A model in stages."""

    names: tuple[str, ...]  # of the cuts
    microbatches: int  # into which a shard's batch goes
    rows: int  # images of one, of the largest where they differ
    holders: tuple[int, ...]  # which worker holds each stage
    stages: tuple[StagePass, ...]  # each stage's pass of a micro-batch
    gradients: tuple[int, ...]  # bytes of each worker's
    ideal: float  # bubble of equal stages
    balanced_by: str  # what made the cuts: recipe, flops or seconds


def cut(fake: FakeModel, layout: Layout, microbatches: int | None = None, costs: Sequence[BlockCost] = ()) -> Cut:
    """Cut the recipe's model as it says, or where the slowest stage is fastest, by `costs` of each block or its FLOPs.
    Raises RecipeError."""
    workers, virtual, wanted = layout.workers, layout.virtual, layout.recipe.pipeline.cuts
    if microbatches is None:  # the recipe's number, or of those that can be one near four a worker
        near = MICROBATCHES * workers
        microbatches = min(layout.microbatches, key=lambda m: (abs(m - near), m))
    rows = -(-layout.rows // microbatches)
    names = cuts_for(fake.traced, wanted, workers * virtual, costs or fake.blocks(rows))
    holders = tuple(ranks_of_stages(layout.schedule, workers, virtual))
    gradients = [0] * workers
    for holder, stage in zip(holders, fake.traced.stages(names), strict=True):
        gradients[holder] += fake.resident(stage).gradients
    return Cut(
        names,
        microbatches,
        rows,
        holders,
        tuple(fake.stages(names, rows, wired=layout.processes > 1)),
        tuple(gradients),
        orders.ideal_bubble(workers, microbatches, virtual),
        "recipe" if wanted != "auto" else "seconds" if costs else "flops",
    )


def candidates(layout: Layout) -> list[int]:
    """The numbers of micro-batches that training would measure."""
    stages, counts = layout.workers * layout.virtual, tuple(layout.microbatches)
    return tuning.counts_to_try(Pipe(layout.workers, ((layout.schedule, stages),), layout.rows, counts))

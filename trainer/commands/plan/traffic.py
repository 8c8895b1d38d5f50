"""What devices send each other in a step."""

from __future__ import annotations

from typing import NamedTuple

from trainer.commands.plan.fake_model import FakeModel
from trainer.commands.plan.planned_layout import Layout
from trainer.commands.plan.schedules import Cut
from trainer.recipe.checks import weight_shards


class Traffic(NamedTuple):
    """Bytes."""

    reduced: float = 0.0  # that each device sends in a step, to reduce gradients, gather shards or average weights
    averaged: float = 0.0  # that it sends in an epoch, to average weights
    crossing: float = 0.0  # of all devices in a step: activations between stages, or copies of the model


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
            return Traffic(resident.parameters * (passes * (parts - 1) / parts + ring(count // parts) / parts))
        case "weights":
            averaged, every = ring(count) * (resident.gradients + resident.buffers), recipe.local_sgd.every
            return Traffic(averaged / every if every else 0.0, averaged)
        case "copies" if layout.kind == "cuda":  # the first device sends copies and gets gradients
            each = (resident.parameters + resident.gradients) * recipe.pieces
            return Traffic(crossing=float((len(layout.devices) - 1) * each))
    return Traffic()

"""What was measured here: a model's speed, in a few seconds, and reading its photos."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer.commands.plan.dataset_facts import DatasetFacts
from trainer.commands.plan.run_plan import ReadingFigures
from trainer.data.cache.stored import measure_reading
from trainer.data.workers.worker_counts import allowed
from trainer.models.balance import BlockCost
from trainer.processes.resources import cores
from trainer.recipe import Recipe
from trainer.recipe.checks import weight_shards


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


def sharded_traffic(recipe: Recipe, ranks: int, size: int) -> float:
    """Bytes that each rank sends in a step to gather weights of so many bytes and to reduce their gradients."""
    parts = weight_shards(recipe, ranks)
    passes = (2 + recipe.fsdp.reshard) * recipe.accumulate  # weights forward, weights backward, gradients
    return size * (passes * (parts - 1) / parts + ring(ranks // parts) / parts)


def gradients_sent(recipe: Recipe, size: int) -> float:
    """Bytes that gradients of so many bytes are sent as."""
    return size / 2 if recipe.ddp.compress else size


def ring(ranks: int) -> float:
    """How often each rank sends a tensor's bytes in a ring all-reduce (Patarasuk and Yuan, 2009)."""
    return 2 * (ranks - 1) / ranks


def reading(recipe: Recipe, images: DatasetFacts, readers: int, wanted: float | None) -> ReadingFigures | None:
    """What is known of reading by so many ranks, for a model that takes `wanted` images/s; None where none is read."""
    if images.photos is None:
        return None
    seconds = measure_reading(images.photos, recipe, images.size, images.channels)
    if seconds is None:
        return None
    wish = recipe.data.workers
    processes = min(cores(), readers * max(1, wish if isinstance(wish, int) else allowed(readers, 0)))
    speed = processes / (seconds.cached if recipe.data.cache != "off" else seconds.whole)
    return ReadingFigures(
        processes=processes,
        read_seconds=seconds.read,
        decode_seconds=seconds.decode,
        transform_seconds=seconds.transform,
        samples_per_sec=processes / seconds.whole,
        bound=None if wanted is None else ("loader" if speed < wanted else "model"),
    )

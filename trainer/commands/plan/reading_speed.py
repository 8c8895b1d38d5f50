"""How fast this machine reads a run's photos, and what the cache of them would take. Measured on some of them."""

from __future__ import annotations

from trainer.commands.plan.dataset_facts import DatasetFacts
from trainer.commands.plan.run_plan import ReadingFigures
from trainer.data.cache.building import estimate
from trainer.data.cache.cache_speed import measure_reading
from trainer.data.cache.packing import Format
from trainer.data.photos.photo_reader import shorter_side
from trainer.data.photos.pixel_range import wanted_of
from trainer.data.workers.worker_counts import allowed
from trainer.processes.resources import cores
from trainer.recipe import Recipe


def reading(recipe: Recipe, images: DatasetFacts, readers: int, wanted: float | None) -> ReadingFigures | None:
    """What is known of reading; None where no photos are read, or none can be.

    Args:
        readers: ranks of this machine that read.
        wanted: images/s that the model computes, where that is predicted.
    """
    if images.photos is None:
        return None
    seconds = measure_reading(images.photos, recipe, images.size, images.channels)
    if seconds is None:
        return None
    wish = recipe.data.workers
    processes = min(cores(), readers * max(1, wish if isinstance(wish, int) else allowed(readers, 0)))
    paths = [images.photos.address(index) for index in range(len(images.photos))]
    size = recipe.data.cache_size or shorter_side(images.size)
    black_white = wanted_of(recipe.data)
    raw, jpeg = (estimate(paths, Format(kind, size, images.channels, black_white)) for kind in ("raw", "jpeg"))
    whole_set = 1 + (images.val or 0) / len(paths)  # the cache holds the held-out images too
    speed = processes / (seconds.cached if recipe.data.cache != "off" else seconds.whole)
    return ReadingFigures(
        processes=processes,
        read_seconds=seconds.read,
        decode_seconds=seconds.decode,
        transform_seconds=seconds.transform,
        samples_per_sec=processes / seconds.whole,
        cached_samples_per_sec=processes / seconds.cached,
        cache_bytes=round(whole_set * raw.bytes),
        jpeg_cache_bytes=round(whole_set * jpeg.bytes),
        cache_seconds=whole_set * raw.seconds / cores(),
        bound=None if wanted is None else ("loader" if speed < wanted else "model"),
    )

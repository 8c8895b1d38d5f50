"""What was measured: of a model's speed, by an earlier run or here in a few seconds, and of reading its photos here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer import recipe as recipes
from trainer.commands.plan.dataset_facts import DatasetFacts, dataset_facts
from trainer.commands.plan.run_plan import ReadingFigures
from trainer.data.cache.building import estimate
from trainer.data.cache.stored import Format, measure_reading
from trainer.data.photos.photo_reader import shorter_side
from trainer.data.photos.pixel_range import wanted_of
from trainer.data.workers.worker_counts import allowed
from trainer.errors import RecipeError, SetupError
from trainer.models.balance import BlockCost
from trainer.processes.resources import cores
from trainer.recipe import Recipe, checks
from trainer.recipe.checks import weight_shards
from trainer.saving.files import read_json

SAME = ("model.name", "precision", "channels_last", "compile")  # what a speed depends on beside the image's size


@dataclass(frozen=True)
class StagesOfRun:
    """How the run that was measured was cut."""

    cuts: list[str]  # names after which the model was cut
    microbatches: int
    split_size: int  # images of a micro-batch
    seconds: list[float]  # of each stage in a step
    recompute: bool  # whether they hold activations computed twice


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
    # seconds of communication in a step that nothing hid, and the ranks it was among
    exposed: tuple[float, int] | None = None
    stages: StagesOfRun | None = None  # of the run that was measured, where it had some
    assumptions: tuple[str, ...] = ()  # for people


def from_run(name: str, recipe: Recipe, images: DatasetFacts) -> Timings:
    """What a run folder's result.json tells. Raises SetupError, RecipeError."""
    key, folder = f"measured={name}", Path(name).expanduser()
    try:
        result = read_json(folder / "result.json")
        was = recipes.load(str(folder))
    except OSError:
        raise SetupError(f"{key} is not a run folder: give one that holds a result.json, or measured=here") from None
    except ValueError as error:
        raise SetupError(f"{key}: its files cannot be read ({error})") from None
    try:
        return _of_run(key, folder, result, was, recipe, images)
    except (KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise SetupError(f"{key}: its result.json is damaged ({type(error).__name__}: {error})") from None


def _of_run(
    key: str, folder: Path, result: dict[str, Any], was: Recipe, recipe: Recipe, images: DatasetFacts
) -> Timings:
    if not result.get("step_time_s"):
        raise SetupError(f"{key} was too short to measure its speed: train 10 steps or more, or measured=here")
    _check_same(key, was, recipe, images)
    if was.traits.exchanges == "copies" and not (result.get("data_parallel") or {}).get("pass_through"):
        raise RecipeError(
            f"{key} is of mode={was.mode}, which mixes computing with copying the model: measure mode=single"
        )
    processes = result["world_size"]
    rows = checks.most_rows(was, checks.shards(was, processes), result["accumulate"])
    step = result["step_time_s"]["mean"]
    shares = (result.get("verdict") or {}).get("step") or {"data": result["data_wait_fraction"] or 0.0}
    apart = {name: step * shares.get(name, 0.0) for name in ("data", "logging", "optimizer", "communication")}
    stages = result.get("pipeline") or {}
    busy = stages.get("stage_seconds") or []
    if was.traits.micro_batches and sum(busy):
        image = sum(busy) / rows
        rows = stages["split_size"]
    else:
        image = (step - sum(apart.values())) / (rows * result["accumulate"])
    slower = 1.0
    if str(result["devices"][0]).startswith("cpu") and recipe.threads and result["throughput"]:
        slower = result["throughput"]["threads"] / recipe.threads
        image *= slower
    computing = f"computing as in {folder}: {1e3 * image:.3g} ms per image, in passes of {rows}, on "
    computing += f"{result['devices'][0]} beside {processes - 1} more" if processes > 1 else str(result["devices"][0])
    reduced = was.traits.exchanges == "gradients" and apart["communication"]
    exposed = apart["communication"] * gradients_sent(recipe, 1) / gradients_sent(was, 1)
    return Timings(
        image,
        rows,
        apart["optimizer"],
        apart["data"] + apart["logging"],
        exposed=(exposed, processes) if reduced else None,
        stages=StagesOfRun(stages["cuts"], stages["microbatches"], stages["split_size"], busy, was.pipeline.recompute)
        if busy
        else None,
        assumptions=(
            computing,
            *([f"threads={recipe.threads} computes {1 / slower:.3g} times as fast as there"] if slower != 1 else []),
            "images arrive and are logged as fast as there",
        ),
    )


def _check_same(key: str, was: Recipe, recipe: Recipe, images: DatasetFacts) -> None:
    old, new = recipes.flatten(was.to_dict()), recipes.flatten(recipe.to_dict())
    differ = [(name, old[name], new[name]) for name in SAME if old[name] != new[name]]
    before = dataset_facts(was).size
    differ += [("data.image_size", before, images.size)] if before != images.size else []
    if differ:
        name, there, here = differ[0]
        raise RecipeError(
            f"{key} ran with {name}={str(there).lower()} and this plan has {str(here).lower()}: "
            "measure the same, or measured=here"
        )


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

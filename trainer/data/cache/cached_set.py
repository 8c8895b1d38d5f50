"""A data set as it is read with data.cache: from the cache, made first where it is not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from trainer.data import Datasets, ImageSet, TensorSet
from trainer.data.cache import building, homes
from trainer.data.cache.building import SPARE, estimate
from trainer.data.cache.packing import Format, Packing, pack
from trainer.data.cache.stored import CachedFolder
from trainer.data.encoded import EncodedPhotos
from trainer.data.photos.photo_reader import shorter_side
from trainer.data.photos.pixel_range import wanted_of
from trainer.errors import RecipeError, TrainerError
from trainer.processes.rank import Place
from trainer.processes.resources import cores
from trainer.processes.world import PATIENCE, World
from trainer.recipe import Recipe
from trainer.telemetry.readable import as_size, duration

AUTO = ("raw", "jpeg")  # the ways of storing that data.cache=auto tries, in this order
SHARE = 0.5  # of a disk's free room that data.cache=auto takes

Folders = tuple[EncodedPhotos, EncodedPhotos]  # to train on, and held out


def cached(
    data: Datasets, recipe: Recipe, world: World, say: Callable[[str], None], closing: ExitStack
) -> tuple[Datasets, Recipe]:
    """The same set, its photos read from the cache until `closing` is closed. It is made where it is not there.

    Sets that lie in memory stay as they are. The recipe says then what was chosen where it left that open. Collective.

    Args:
        say: what is told to people, on one rank of all.

    Raises:
        RecipeError: the photos are no files of this machine.
        SetupError, DiskFullError, PeerError: it cannot be made.
    """
    wish = recipe.data
    if wish.cache == "off" or isinstance(data.train, ImageSet | TensorSet):
        return as_stored(data, recipe), recipe  # a run that had a cache goes on with its pixels
    if not isinstance(data.train, EncodedPhotos) or not isinstance(data.val, EncodedPhotos):
        if wish.cache == "auto":
            return data, recipe.replace(data__cache="off")
        raise RecipeError(
            f"data.cache={wish.cache} is for photos in files or shards, and data.name={wish.name} has none: "
            "set data.cache=off"
        )
    folders = data.train, data.val
    if wish.cache == "auto":
        recipe = recipe.replace(**world.broadcast_object(_choice(world.gather(_fitting(folders, recipe, data)))))
        if recipe.data.cache == "off":
            say("  cache: off, for the disk has no room for it")
            return data, recipe
    how = _how(recipe, data, recipe.data.cache_format or "raw")
    home, packing = world.all_or_none(lambda: _filled(folders, how, recipe, world.place, say, closing), PATIENCE)
    train, val = (CachedFolder(part, how, number, home, packing) for number, part in enumerate(folders))
    recipe = recipe.replace(data__cache_format=how.layout, data__cache_size=how.size)
    return replace(data, train=train, val=val), recipe


def as_stored(data: Datasets, recipe: Recipe) -> Datasets:
    """The same set with the pixels that a run's cache has, whether that is still there or not; nothing is made."""
    wish, folders = recipe.data, (data.train, data.val)
    if wish.cache_size is None or wish.cache_format is None:
        return data
    how = _how(recipe, data, wish.cache_format)
    train, val = (CachedFolder(part, how) if isinstance(part, EncodedPhotos) else part for part in folders)
    return replace(data, train=train, val=val)


def _how(recipe: Recipe, data: Datasets, layout: str) -> Format:
    size = recipe.data.cache_size or shorter_side(data.image_size)
    return Format(layout, size, data.channels, wanted_of(recipe.data))


def _fitting(folders: Folders, recipe: Recipe, data: Datasets) -> int:
    """Which of `AUTO` this machine's disk has room for, or a cache of already: the first; their number if none."""
    for number, layout in enumerate(AUTO):
        if recipe.data.cache_format in (None, layout):
            how = _how(recipe, data, layout)
            try:
                with ExitStack() as closing:
                    home, packing = _opened(folders, how, recipe, closing)
                    needed = estimate(_absent(home, packing), how)
            except TrainerError:  # a folder that cannot be written, or a disk that is full
                continue
            if needed.bytes + SPARE <= SHARE * shutil.disk_usage(home).free or not needed.photos:
                return number
    return len(AUTO)


def _choice(fitting: Sequence[int]) -> dict[str, str]:
    """What to replace in a recipe: what fits on every machine."""
    number = max(fitting, default=0)  # nobody asks any rank but the first
    return {"data__cache": "disk", "data__cache_format": AUTO[number]} if number < len(AUTO) else {"data__cache": "off"}


def _opened(folders: Folders, how: Format, recipe: Recipe, closing: ExitStack) -> tuple[Path, Packing]:
    """The folder of a cache, in use until `closing` is closed, and what has to lie in it."""
    packing = pack(folders, how)
    home = homes.opened(recipe.data, how, packing)
    closing.callback(home.close)
    homes.sweep()
    return home.path, packing


def _absent(home: Path, packing: Packing) -> list[bytes]:
    """The photos that the cache does not hold."""
    return [path for block in building.missing(packing, home) for path in packing.paths[block]]


def _filled(
    folders: Folders, how: Format, recipe: Recipe, place: Place, say: Callable[[str], None], closing: ExitStack
) -> tuple[Path, Packing]:
    """A cache with nothing missing."""
    home, packing = _opened(folders, how, recipe, closing)
    needed = estimate(_absent(home, packing), how)
    if not needed.photos:
        say(f"  cache: {home}, whole")
        return home, packing
    building.require_room(home, needed, how, recipe.data.cache == "ram")
    wish = recipe.data.workers
    workers = wish if isinstance(wish, int) and wish else max(1, cores() // place.local_size)
    say(
        f"  cache: {needed.photos:,} photos to {home}, about {as_size(needed.bytes)} in "
        f"{duration(needed.seconds / (workers * place.local_size))}"
    )
    show = recipe.logging.progress and place.local_rank == 0
    building.build(packing, how, home, workers, show, recipe.timeout)
    return home, packing

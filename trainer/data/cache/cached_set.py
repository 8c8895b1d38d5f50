"""A data set with its photos in the cache, which is built where it is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from trainer.data import Datasets, ImageSet, TensorSet
from trainer.data.cache import building, homes
from trainer.data.cache.stored import CachedFolder, Format, Packing, pack
from trainer.data.encoded import EncodedPhotos
from trainer.data.photos.photo_reader import shorter_side
from trainer.data.photos.pixel_range import wanted_of
from trainer.errors import DiskFullError, RecipeError
from trainer.processes.rank import Place
from trainer.processes.resources import cores
from trainer.processes.world import DATA_PATIENCE, World
from trainer.recipe import Recipe
from trainer.recipe.image_sizes import typed_size
from trainer.telemetry.readable import as_size

SPARE = 2**28  # bytes that stay free on the disk

Folders = tuple[EncodedPhotos, EncodedPhotos]  # for training, and held out


def cached(
    data: Datasets, recipe: Recipe, world: World, say: Callable[[str], None], closing: ExitStack
) -> tuple[Datasets, Recipe]:
    """The same set, its photos read from the cache until `closing` is closed; the cache is built where it is missing.

    Sets in memory stay as they are. The recipe that is returned has the format and size of the cache. Collective. `say`
    prints a line, on one rank. Raises RecipeError: the photos are not files of this machine; SetupError, DiskFullError,
    PeerError: it cannot be built.
    """
    options = recipe.data
    if options.cache == "off" or isinstance(data.train, ImageSet | TensorSet):
        if options.cache != "off" and not data.synthetic:
            say(f"data.cache={options.cache} does nothing here: data.name={data.name} is in memory as a whole")
        return as_stored(data, recipe), recipe  # a run that had a cache goes on with its pixels
    if not isinstance(data.train, EncodedPhotos) or not isinstance(data.val, EncodedPhotos):
        raise RecipeError(
            f"data.cache={options.cache} is for photos in files or shards, and data.name={options.name} has none: "
            "set data.cache=off"
        )
    if options.cache_format == "jpeg" and data.channels not in (1, 3):
        raise RecipeError(f"data.cache_format=jpeg holds 1 or 3 channels, not {data.channels}: set it to raw")
    folders = data.train, data.val
    how = _how(recipe, data, options.cache_format or "raw")
    home, packing = world.all_or_none(lambda: _filled(folders, how, recipe, world.place, say, closing), DATA_PATIENCE)
    train, val = (CachedFolder(part, how, number, home, packing) for number, part in enumerate(folders))
    recipe = recipe.replace(data__cache_format=how.layout, data__cache_size=how.size)
    return replace(data, train=train, val=val), recipe


def as_stored(data: Datasets, recipe: Recipe) -> Datasets:
    """The same set with the pixels of a run's cache, whether it still exists or not; nothing is built."""
    options, folders = recipe.data, (data.train, data.val)
    if options.cache_size is None or options.cache_format is None:
        return data
    how = _how(recipe, data, options.cache_format)
    train, val = (CachedFolder(part, how) if isinstance(part, EncodedPhotos) else part for part in folders)
    return replace(data, train=train, val=val)


def _how(recipe: Recipe, data: Datasets, layout: str) -> Format:
    size = typed_size(recipe.data.cache_size) or shorter_side(data.image_size)
    return Format(layout, size, data.channels, wanted_of(recipe.data))


def _filled(
    folders: Folders, how: Format, recipe: Recipe, place: Place, say: Callable[[str], None], closing: ExitStack
) -> tuple[Path, Packing]:
    """A complete cache."""
    packing = pack(folders, how)
    home, lock = homes.opened(recipe.data, how, packing)
    closing.callback(os.close, lock)
    absent = [path for block in building.missing(packing, home) for path in packing.paths[block]]
    if not absent:
        say(f"  cache: {home}, whole")
        return home, packing
    needed, free = building.bytes_of(absent, how), shutil.disk_usage(home).free
    if needed + SPARE > free:
        raise DiskFullError(
            f"the cache of {len(absent):,} photos takes about {as_size(needed)}, and {home} has {as_size(free)} free: "
            "data.cache_format=jpeg takes a tenth of raw, data.cache_dir=FOLDER another disk, or data.cache=off"
        )
    say(f"  cache: {len(absent):,} photos to {home}, about {as_size(needed)}")
    workers = recipe.data.workers or max(1, cores() // place.local_size)
    building.build(packing, how, home, workers, recipe.logging.progress and place.local_rank == 0, recipe.timeout)
    return home, packing

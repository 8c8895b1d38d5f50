"""A data set as it is read with data.cache: from the cache, made first where it is not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from trainer.caching import building, homes
from trainer.caching.building import SPARE, estimate, size_of
from trainer.caching.packing import Packing, Preparation, pack
from trainer.caching.stored import CachedFolder
from trainer.data import Datasets, ImageSet, TensorSet
from trainer.data.folders import PhotoFolder
from trainer.data.photos import shorter_side
from trainer.errors import RecipeError, SetupError
from trainer.processes.rank import place
from trainer.processes.world import cores
from trainer.recipe import Recipe

AUTO = ("raw", "jpeg")  # the ways of storing that data.cache=auto tries, in this order
SHARE = 0.5  # of a disk's free room that data.cache=auto takes


def cached(
    data: Datasets, recipe: Recipe, ranks: int, say: Callable[[str], None], closing: ExitStack
) -> tuple[Datasets, Recipe]:
    """The same set, its photos read from the cache until `closing` is closed. It is made where it is not there.

    Sets that lie in memory stay as they are. The recipe says then what was chosen where it left that open.

    Args:
        ranks: of this machine, which build together.
        say: what is told to people, on one rank of all.

    Raises:
        RecipeError: the photos are no files of this machine.
        SetupError, DiskFullError, PeerError: it cannot be made.
    """
    wish = recipe.data
    if wish.cache == "off" or isinstance(data.train, ImageSet | TensorSet):
        return data, recipe
    if not isinstance(data.train, PhotoFolder) or not isinstance(data.val, PhotoFolder):
        if wish.cache == "auto":
            return data, recipe.replace(data__cache="off")
        raise RecipeError(
            f"data.cache={wish.cache} is for folders of photos, and data.name={wish.name} is none: set data.cache=off"
        )
    folders, root = (data.train, data.val), Path(wish.root or ".").expanduser()
    for layout in AUTO if wish.cache == "auto" and wish.cache_format is None else (wish.cache_format or "raw",):
        how = Preparation(layout, wish.cache_size or shorter_side(data.image_size), data.channels)
        found = _filled(folders, root, how, recipe, ranks, say, closing)
        if found is not None:
            train, val = (CachedFolder(part, how, n, *found) for n, part in enumerate(folders))
            chosen = {"data__cache_format": how.layout, "data__cache_size": how.size}
            kind = "disk" if wish.cache == "auto" else wish.cache
            return replace(data, train=train, val=val), recipe.replace(data__cache=kind, **chosen)
    say("  cache: off, for the disk has no room for it")
    return data, recipe.replace(data__cache="off")


def as_stored(data: Datasets, recipe: Recipe) -> Datasets:
    """The same set with the pixels that a run's cache has, whether that is still there or not; nothing is made."""
    wish, folders = recipe.data, (data.train, data.val)
    if wish.cache == "off" or wish.cache_size is None or wish.cache_format is None:
        return data
    how = Preparation(wish.cache_format, wish.cache_size, data.channels)
    train, val = (CachedFolder(part, how) if isinstance(part, PhotoFolder) else part for part in folders)
    return replace(data, train=train, val=val)


def _filled(
    folders: tuple[PhotoFolder, PhotoFolder],
    root: Path,
    how: Preparation,
    recipe: Recipe,
    ranks: int,
    say: Callable[[str], None],
    closing: ExitStack,
) -> tuple[Path, Packing] | None:
    """A cache with nothing missing; None where data.cache=auto finds no room for it."""
    try:
        packing = pack(folders, how)
    except OSError as error:
        raise SetupError(f"{os.fsdecode(error.filename)} cannot be read ({error.strerror}); start again") from None
    home = homes.opened(recipe.data, root, how)
    closing.callback(home.close)
    home.prune(packing)
    absent = building.missing(packing, home.path)
    if not absent:
        say(f"  cache: {home.path}, whole")
        return home.path, packing
    needed = estimate([path for block in absent for path in packing.paths[block]], how)
    if recipe.data.cache == "auto" and needed.bytes + SPARE > SHARE * shutil.disk_usage(home.path).free:
        return None
    building.require_room(home.path, needed, how)
    wish = recipe.data.workers
    workers = wish if isinstance(wish, int) and wish else max(1, cores() // ranks)
    say(
        f"  cache: {needed.photos:,} photos to {home.path}, about {size_of(needed.bytes)} in "
        f"{needed.seconds / (workers * ranks):.0f} s"
    )
    building.build(
        packing, how, home.path, workers, recipe.logging.progress and place().local_rank == 0, recipe.timeout
    )
    return home.path, packing

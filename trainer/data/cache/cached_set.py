"""A data set with its photos in the cache, whose missing blocks are built, on all cores, by all ranks of a machine and
all jobs that need them.

There is no leader. The process that locks a block's draft first writes it, and renames it once it is complete and on
the disk; the lock of a process that dies is released. A build that was killed continues with the missing blocks.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import torch

from trainer.data import Datasets, ImageSet, TensorSet
from trainer.data.cache import cache_blocks, homes
from trainer.data.cache.cache_blocks import Prepared
from trainer.data.cache.stored import CachedFolder, Format, Packing, block_path, key_of, pack, prepared
from trainer.data.encoded import EncodedPhotos
from trainer.data.photos.photo_reader import shorter_side
from trainer.data.photos.pixel_range import wanted_of
from trainer.errors import DiskFullError, PeerError, RecipeError, SetupError, is_disk_full
from trainer.processes import fork_server
from trainer.processes.rank import Place
from trainer.processes.resources import PHOTOS, cores, keep_freed_memory
from trainer.processes.silence import AwakeClock
from trainer.processes.world import DATA_PATIENCE, World
from trainer.recipe import Recipe
from trainer.recipe.image_sizes import typed_size
from trainer.saving import locks
from trainer.telemetry.readable import as_size
from trainer.telemetry.tracking import Progress

SPARE = 2**28  # bytes that stay free on the disk
LOOKED_AT, SECONDS = 24, 2.0  # photos that are prepared to estimate the size, and seconds after which fewer do
POLL = 0.5  # seconds between two checks of others' blocks

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
    absent = [path for block in missing(packing, home) for path in packing.paths[block]]
    if not absent:
        say(f"  cache: {home}, whole")
        return home, packing
    needed, free = bytes_of(absent, how), shutil.disk_usage(home).free
    if needed + SPARE > free:
        raise DiskFullError(
            f"the cache of {len(absent):,} photos takes about {as_size(needed)}, and {home} has {as_size(free)} free: "
            "data.cache_format=jpeg takes a tenth of raw, data.cache_dir=FOLDER another disk, or data.cache=off"
        )
    say(f"  cache: {len(absent):,} photos to {home}, about {as_size(needed)}")
    workers = recipe.data.workers or max(1, cores() // place.local_size)
    build(packing, how, home, workers, recipe.logging.progress and place.local_rank == 0, recipe.timeout)
    return home, packing


def missing(packing: Packing, home: Path) -> list[int]:
    """The blocks that have to be built."""
    names = set(os.listdir(home))
    return [block for block, key in enumerate(packing.keys) if block_path("", key.tobytes()) not in names]


def bytes_of(paths: Sequence[bytes], how: Format) -> int:
    """About how large photos are in the cache, by the size of some."""
    start, sizes = time.perf_counter(), []
    for path in random.Random(0).sample(paths, min(LOOKED_AT, len(paths))):
        with suppress(Exception):  # decoders raise anything at all; what cannot be read takes no room
            sizes.append(prepared(path, how).data.nbytes)
        if time.perf_counter() - start > SECONDS and sizes:
            break
    return int(len(paths) * sum(sizes) / max(1, len(sizes)))


def build(packing: Packing, how: Format, home: Path, workers: int, show: bool, patience: float) -> None:
    """Build the missing blocks with `workers` processes; returns when none is missing, whoever built them.

    `show` a progress bar, or lines. Raises PeerError: a process died, or none built a block for `patience` seconds;
    DiskFullError, SetupError: `home` cannot be written, or photos change meanwhile.
    """
    absent = missing(packing, home)
    since_moved, sizes = AwakeClock(), [len(paths) for paths in packing.paths]
    context = fork_server.context("torchvision", __name__)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin)
    progress = Progress(sum(sizes[n] for n in absent), show, "cache", "photo", first=0.0)
    try:
        while absent:
            random.shuffle(absent)  # so that ranks and jobs take different ones
            asked = [pool.submit(make, str(home), packing.keys[n].tobytes(), packing.paths[n], how) for n in absent]
            for done in as_completed(asked):
                done.result()
                if progress.due():
                    progress.left(sum(sizes[n] for n in missing(packing, home)))  # others build, too
            before, absent = len(absent), missing(packing, home)
            if len(absent) < before:
                since_moved = AwakeClock()
            elif since_moved.seconds() > patience:
                raise PeerError(
                    f"{home}: another process began {len(absent)} blocks of the cache {patience:g} seconds "
                    "ago and finished none: end it, or set data.cache=off"
                )
            else:
                time.sleep(POLL)
    except BrokenProcessPool:
        raise PeerError(
            "a process that built the cache died (killed, or out of memory): type the same again, it goes on; "
            "data.workers=1 takes less memory. Where its error is above, it imports the script that trains, which "
            'needs if __name__ == "__main__": around train(...)'
        ) from None
    except SetupError:
        raise
    except OSError as error:
        if is_disk_full(error):
            raise DiskFullError(
                f"{home}: the disk is full: what is built stays: free some space and type the same again, or take "
                "data.cache_format=jpeg, data.cache_dir=FOLDER or data.cache=off"
            ) from error
        raise homes.unwritable(home, error) from error
    finally:
        pool.shutdown(cancel_futures=True)
        progress.close()


def make(home: str, key: bytes, paths: Sequence[bytes], how: Format) -> None:
    """Build one block, unless another process does. Raises OSError, SetupError."""
    torch.set_num_threads(1)
    path = Path(block_path(home, key))
    draft = path.with_suffix(cache_blocks.DRAFT)
    with locks.claimed(draft) as file:
        if file is None:
            return
        try:
            if not path.exists():
                cache_blocks.write(file, key, (_or_none(name, how) for name in paths), len(paths))
                if key_of(paths, how) != key:
                    where = os.fsdecode(os.path.dirname(paths[0].partition(b"\0")[0]))
                    raise SetupError(f"{where}: photos were changed while the cache was built: type the same again")
                os.replace(draft, path)
        except FileNotFoundError:  # another machine was faster, on a disk whose locks it does not see
            if not path.exists():
                raise
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)  # still locked: nobody else writes to it


def _begin() -> None:
    fork_server.begin_worker()
    keep_freed_memory(PHOTOS)


def _or_none(path: bytes, how: Format) -> Prepared | None:
    """A photo to be stored; None where it cannot be read or decoded: training reads the photo itself, and reports."""
    with suppress(Exception):  # decoders raise anything at all
        return prepared(path, how)
    return None

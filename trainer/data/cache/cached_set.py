"""Data sets that read their photos from the cache, and the build of missing cache blocks.

All ranks of a machine, and all jobs that need the same cache, build missing blocks together on all
cores. No process leads. The process that first locks the draft of a block writes the block, syncs
it to the disk and renames it. The kernel releases the lock of a process that dies, so that another
process can build the block. After a build was killed, the next one builds only the missing blocks.
"""

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

from trainer.data import Datasets
from trainer.data.cache import cache_blocks, homes
from trainer.data.cache.cache_blocks import Prepared
from trainer.data.cache.stored import (
    CachedFolder,
    Format,
    Packing,
    block_path,
    format_of,
    key_of,
    origins_of,
    pack,
    prepared,
    remove_changed,
)
from trainer.data.encoded import EncodedPhotos
from trainer.data.workers.worker_pool import begin_worker
from trainer.distributed.world import World
from trainer.errors import DiskFullError, PeerError, RecipeError, SetupError, is_disk_full
from trainer.processes import fork_server
from trainer.processes.rank import Place
from trainer.processes.resources import count_cores
from trainer.processes.silence import AwakeClock
from trainer.recipe import Recipe
from trainer.saving import locks
from trainer.telemetry.readable import format_size
from trainer.telemetry.tracking import Progress

# Number of bytes that must remain free on the disk: a cache that would need them is not built.
RESERVED_BYTES = 2**28
# Maximum number of photos to prepare for an estimate of the cache's size, and the time in seconds
# after which the estimate uses the photos prepared so far.
SAMPLED_PHOTOS = 24
SAMPLING_SECONDS = 2.0
# Time in seconds between two checks for blocks that other processes built.
POLL_SECONDS = 0.5


def cached(
    data: Datasets,
    recipe: Recipe,
    world: World,
    say: Callable[[str], None],
    closing: ExitStack,
) -> tuple[Datasets, Recipe]:
    """Return the data set with its photos read from the cache, and build the cache if necessary.

    With data.cache=off, no cache is read or built, and `as_stored` returns the data set. Data sets
    in memory are returned unchanged. All ranks call this function together.

    Args:
        data: the data set.
        recipe: the recipe, whose `data.cache` says whether to use a cache.
        world: the ranks.
        say: function that prints one line, on one rank.
        closing: stack that releases the lock on the cache when it is closed.

    Returns:
        (data, recipe): the data set that reads from the cache, and the recipe with the cache's
        format and size as `data.cache_format` and `data.cache_size`.

    Raises:
        RecipeError: the data set has no photos in files or shards, or the format cannot store them.
        SetupError, DiskFullError, PeerError: the cache cannot be built.
    """
    options = recipe.data
    if options.cache == "off" or data.is_in_memory:
        # If a run that started with a cache is resumed without it, it must see the same pixels.
        return as_stored(data, recipe), recipe
    if not isinstance(data.train, EncodedPhotos) or not isinstance(data.val, EncodedPhotos):
        raise RecipeError(
            f"data.cache={options.cache} is for photos in files or shards, and "
            f"data.name={options.name} has none: set data.cache=off"
        )
    if options.cache_format == "jpeg" and data.channels not in (1, 3):
        raise RecipeError(
            f"data.cache_format=jpeg holds 1 or 3 channels, not {data.channels}: set it to raw"
        )
    folders = data.train, data.val
    photo_format = format_of(recipe, data.image_size, data.channels)
    home, packing = world.all_or_none(
        lambda: _open_complete(folders, photo_format, recipe, world.place, say, closing)
    )
    recipe = recipe.replace(
        data__cache_format=photo_format.layout,
        data__cache_size=photo_format.size,
    )
    data = replace(
        data,
        train=CachedFolder(data.train, photo_format, 0, home, packing),
        val=CachedFolder(data.val, photo_format, 1, home, packing),
    )
    return data, recipe


def as_stored(data: Datasets, recipe: Recipe) -> Datasets:
    """Return the data set with its photos prepared as the run's cache stores them.

    No cache is read or built, and the pixels are the same as those from the cache. If the run had
    no cache, the data set is returned unchanged.
    """
    options = recipe.data
    if options.cache_size is None or options.cache_format is None:
        return data
    photo_format = format_of(recipe, data.image_size, data.channels)
    if isinstance(data.train, EncodedPhotos):
        data = replace(data, train=CachedFolder(data.train, photo_format))
    if isinstance(data.val, EncodedPhotos):
        data = replace(data, val=CachedFolder(data.val, photo_format))
    return data


def _open_complete(
    folders: Sequence[EncodedPhotos],
    photo_format: Format,
    recipe: Recipe,
    place: Place,
    say: Callable[[str], None],
    closing: ExitStack,
) -> tuple[Path, Packing]:
    """Open the cache of the photos, and build its missing blocks.

    Returns:
        (home, packing): the directory of the cache, and the assignment of photos to blocks.
    """
    packing = pack(folders, photo_format)
    home, lock = homes.opened(recipe.data, photo_format, packing)
    closing.callback(os.close, lock)
    missing_photos: list[bytes] = []
    try:
        check_photos(packing, home)
        for block in list_missing(packing, home):
            missing_photos += packing.paths[block]
        free = shutil.disk_usage(home).free
    except OSError as error:
        raise homes.unwritable(home, error) from error
    if not missing_photos:
        say(f"  cache: {home}, complete")
        return home, packing
    needed = estimate_bytes(missing_photos, photo_format)
    if needed + RESERVED_BYTES > free:
        raise DiskFullError(
            f"the cache of {len(missing_photos):,} photos needs about {format_size(needed)}, but "
            f"{home} has {format_size(free)} free: type data.cache_format=jpeg (a tenth of raw), "
            "data.cache_dir=FOLDER on another disk, or data.cache=off"
        )
    say(f"  cache: {len(missing_photos):,} photos to {home}, about {format_size(needed)}")
    build(
        packing,
        photo_format,
        home,
        workers=recipe.data.workers or max(1, count_cores() // place.local_size),
        show=recipe.logging.progress and place.local_rank == 0,
        patience=recipe.timeout,
    )
    return home, packing


def list_missing(packing: Packing, home: Path) -> list[int]:
    """Return the indices of the blocks that have to be built."""
    names = set(os.listdir(home))
    return [block for block, key in enumerate(packing.keys) if block_path("", key) not in names]


def check_photos(packing: Packing, home: Path) -> None:
    """Remove the blocks whose photos were replaced.

    Raises:
        OSError: a block cannot be removed.
    """
    for key, paths in zip(packing.keys, packing.paths, strict=True):
        # The block may not be built yet, or another process may have removed it.
        with suppress(FileNotFoundError):
            remove_changed(block_path(str(home), key), paths)


def estimate_bytes(paths: Sequence[bytes], photo_format: Format) -> int:
    """Estimate the total size in bytes of photos in the cache from the mean size of a few."""
    start = time.perf_counter()
    sizes = []
    for path in random.Random(0).sample(paths, min(SAMPLED_PHOTOS, len(paths))):
        # Decoders can raise any exception. Photos that cannot be read are left out of the mean.
        with suppress(Exception):
            sizes.append(prepared(path, photo_format).data.nbytes)
        if time.perf_counter() - start > SAMPLING_SECONDS and sizes:
            break
    return int(len(paths) * sum(sizes) / max(1, len(sizes)))


def build(
    packing: Packing,
    photo_format: Format,
    home: Path,
    workers: int,
    show: bool,
    patience: float,
) -> None:
    """Build the missing blocks of a cache, and return once no block is missing.

    Other processes may build blocks of the same cache at the same time.

    Args:
        packing: the blocks.
        photo_format: the form in which photos are stored.
        home: directory of the cache.
        workers: number of processes.
        show: whether to show the progress.
        patience: seconds without a new block after which waiting for another process fails.

    Raises:
        PeerError: a worker process died, or another process builds no block for `patience` seconds.
        DiskFullError, SetupError: `home` cannot be written, or photos change during the build.
    """
    missing = list_missing(packing, home)
    since_progress = AwakeClock()
    sizes = [*map(len, packing.paths)]
    context = fork_server.start_server("torchvision", __name__)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=begin_worker)
    progress = Progress(sum(sizes[n] for n in missing), show, "cache", "photo", first=0.0)
    try:
        while missing:
            # Ranks and jobs that build the same cache should start with different blocks.
            random.shuffle(missing)
            futures = []
            for block in missing:
                paths = packing.paths[block]
                key = packing.keys[block]
                futures.append(pool.submit(build_block, str(home), key, paths, photo_format))
            for future in as_completed(futures):
                future.result()
                if progress.is_due():
                    # Blocks that other processes built count as progress, too.
                    progress.set_remaining(sum(sizes[n] for n in list_missing(packing, home)))
            missing_before = len(missing)
            missing = list_missing(packing, home)
            if len(missing) < missing_before:
                since_progress = AwakeClock()
            elif since_progress.seconds() > patience:
                raise PeerError(
                    f"{home}: another process started {len(missing)} blocks of the cache "
                    f"{patience:g} seconds ago and did not finish any: stop that process, or set "
                    "data.cache=off"
                )
            else:
                time.sleep(POLL_SECONDS)
    except BrokenProcessPool:
        raise PeerError(
            "a process that built the cache died (killed, or out of memory): type the same command "
            "again to resume the build; data.workers=1 needs less memory. If an error of that "
            "process is printed above, the process could not import the training script, which "
            'needs if __name__ == "__main__": around train(...)'
        ) from None
    except SetupError:
        raise
    except OSError as error:
        if is_disk_full(error):
            raise DiskFullError(
                f"{home}: the disk is full. Finished blocks are kept: free some space and type the "
                "same command again, or set data.cache_format=jpeg, data.cache_dir=FOLDER or "
                "data.cache=off"
            ) from error
        raise homes.unwritable(home, error) from error
    finally:
        pool.shutdown(cancel_futures=True)
        progress.close()


def build_block(
    home: str,
    key: bytes,
    paths: Sequence[bytes],
    photo_format: Format,
) -> None:
    """Build one block, unless it exists or another process is building it.

    Args:
        home: directory of the cache.
        key: name of the block.
        paths: addresses of the block's photos.
        photo_format: the form in which photos are stored.

    Raises:
        OSError: the block cannot be written.
        SetupError: photos changed during the build.
    """
    path = Path(block_path(home, key))
    draft = path.with_suffix(cache_blocks.DRAFT)
    with locks.claim_file(draft) as file:
        if file is None or path.exists():
            return
        try:
            origins = cache_blocks.marked(origins_of(paths))
            photos = (_prepare_or_none(name, photo_format) for name in paths)
            cache_blocks.write(file, key, photos, len(paths), origins)
            if key_of(paths, photo_format) != key:
                folder = os.fsdecode(os.path.dirname(paths[0].partition(b"\0")[0]))
                raise SetupError(
                    f"{folder}: photos changed while the cache was built: type the same command "
                    "again"
                )
            os.replace(draft, path)
        except FileNotFoundError:
            # Locks on a network disk may not be visible to other machines. If another machine has
            # renamed this draft, the block exists, and nothing is left to do.
            if not path.exists():
                raise


def _prepare_or_none(path: bytes, photo_format: Format) -> Prepared | None:
    """Return the photo to store, or None if it cannot be read or decoded.

    Training reads a photo without cached pixels from its original file, and reports the failure.
    """
    # Decoders can raise any exception.
    with suppress(Exception):
        return prepared(path, photo_format)
    return None

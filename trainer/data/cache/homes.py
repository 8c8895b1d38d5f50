"""Directories of caches, one for each data set and format.

<data.cache_dir>/<name of the data set's directory>-<hash>/
    about.json      description of the data set and the format
    .used           file that every process locks while it reads the cache
    <key>.block     photos (see `cache_blocks`)
"""

import errno
import json
import os
import re
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

import xxhash

from trainer.data.cache import cache_blocks
from trainer.data.cache.stored import Format, Packing, block_path
from trainer.data.downloads import get_data_folder
from trainer.errors import SetupError
from trainer.recipe import DataRecipe
from trainer.saving import locks
from trainer.saving.files import describe_error, write_atomically

ABOUT = "about.json"
USED = ".used"
# Number of attempts to open a directory that other processes may delete at the same time.
TRIES = 100


def parent(cache_dir: str | None) -> Path:
    """Return the directory that contains all caches."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    return get_data_folder() / "cache"


def opened(
    data: DataRecipe,
    how: Format,
    packing: Packing,
) -> tuple[Path, int]:
    """Open the cache directory of a data set, and create it if necessary.

    Blocks of photos that no longer exist or have changed are removed, unless another process uses
    the cache.

    Args:
        data: the recipe's `data` section.
        how: the form in which photos are stored.
        packing: the blocks of the current photos.

    Returns:
        (path, lock): the directory, and the descriptor of its lock, which the caller must close.

    Raises:
        SetupError: the directory cannot be created.
    """
    above = parent(data.cache_dir)
    keep = {block_path("", key) for key in packing.keys}
    path = above / name_of(data, how)
    try:
        for _ in range(TRIES):
            # `exist_ok=True` would fail if another process deletes the directory at this moment.
            with suppress(FileExistsError):
                path.mkdir(parents=True)
            with suppress(FileNotFoundError):
                lock = locks.open_lock(path / USED)
                if locks.try_exclusive_lock(lock):
                    _clear(path, keep)
                locks.lock_shared(lock)
                if locks.is_at(lock, path / USED):
                    break
                # The directory was deleted before it was locked.
                os.close(lock)
        else:
            # All attempts failed, for example because the path is a link to a missing file.
            raise FileNotFoundError(errno.ENOENT, "it cannot be made", str(path))
    except OSError as error:
        raise unwritable(above, error) from None
    facts = {
        "root": str(data.root),
        "format": how.layout,
        "size": how.size,
        "photos": sum(map(len, packing.paths)),
    }
    # The modification time of this file says when the cache was last used. If the directory belongs
    # to another user or is read-only, the cache is used without updating the file.
    with suppress(OSError):
        write_atomically(path / ABOUT, json.dumps(facts, indent=1) + "\n")
    return path, lock


def unwritable(folder: Path, error: OSError) -> SetupError:
    """Return the error for a directory of caches that cannot be written."""
    return SetupError(
        f"{folder} cannot be written ({describe_error(error)}); data.cache_dir=FOLDER chooses "
        "another folder"
    )


def _clear(path: Path, keep: Set[str]) -> None:
    """Remove unused blocks and drafts from a cache that this process has locked exclusively."""
    with suppress(OSError):
        for name in os.listdir(path):
            if name.endswith(cache_blocks.DRAFT):
                # `claim_file` removes the draft on exit if it can lock the draft. A worker of a
                # killed run that still writes the draft holds the lock, so that the draft is kept.
                # If it were removed, the worker would later rename another process's new draft.
                with locks.claim_file(path / name):
                    pass
            elif name.endswith(cache_blocks.SUFFIX) and name not in keep:
                os.unlink(path / name)


def name_of(data: DataRecipe, how: Format) -> str:
    """Return the name of a data set's cache directory.

    The name also depends on the table of labels, because the table selects the photos.
    """
    whole = os.path.realpath(Path(data.root or ".").expanduser())
    # `data.root` may be a long pattern, so keep only the last 40 characters of its name.
    name = re.sub(r"[^\w.-]+", "_", Path(whole).name)[-40:]
    key = "\0".join((whole, data.labels or "", data.image_column or "", str(how)))
    return f"{name}-{xxhash.xxh3_64_hexdigest(os.fsencode(key))}"

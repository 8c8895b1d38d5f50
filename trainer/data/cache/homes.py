"""The folders of caches, one for each set and format.

<data.cache_dir>/<name of the set's folder>-<hash>/
    about.json      which set, and the format
    .used           locked by every process that reads there
    <key>.block
"""

from __future__ import annotations

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
TRIES = 100  # to open a folder that others delete again and again


def parent(cache_dir: str | None) -> Path:
    """The folder of all caches."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    return get_data_folder(DataRecipe()) / "cache"


def opened(data: DataRecipe, how: Format, packing: Packing) -> tuple[Path, int]:
    """The folder of the cache of data.root, created where there is none, and its lock, to be
    closed.

    Blocks that hold none of today's photos are removed, unless another process uses the cache.
    Raises SetupError.
    """
    above = parent(data.cache_dir)
    keep = {block_path("", key) for key in packing.keys}
    path = above / name_of(data, how)
    try:
        for _ in range(TRIES):
            # Not `exist_ok`, which fails if another process deletes the folder at this moment.
            with suppress(FileExistsError):
                path.mkdir(parents=True)
            with suppress(FileNotFoundError):
                lock = locks.open_lock(path / USED)
                if locks.try_exclusive_lock(lock):
                    _clear(path, keep)
                locks.lock_shared(lock)
                if locks.is_at(lock, path / USED):
                    break
                # of a folder that was deleted before it was locked
                os.close(lock)
        else:  # such as a link to nothing
            raise FileNotFoundError(errno.ENOENT, "it cannot be made", str(path))
    except OSError as error:
        raise unwritable(above, error) from None
    facts = {
        "root": str(data.root),
        "format": how.layout,
        "size": how.size,
        "photos": sum(map(len, packing.paths)),
    }
    # another user's, or read-only; its time is when the cache was last used
    with suppress(OSError):
        write_atomically(path / ABOUT, json.dumps(facts, indent=1) + "\n")
    return path, lock


def unwritable(folder: Path, error: OSError) -> SetupError:
    """What is said of a cache's folder."""
    return SetupError(
        f"{folder} cannot be written ({describe_error(error)}); data.cache_dir=FOLDER chooses "
        "another folder"
    )


def _clear(path: Path, keep: Set[str]) -> None:
    """Remove what nobody uses from a folder that is locked."""
    with suppress(OSError):
        for name in os.listdir(path):
            if name.endswith(cache_blocks.DRAFT):
                # A worker of a killed run may still write to it, and would rename ours in its
                # place.
                with locks.claim_file(path / name):
                    pass
            elif name.endswith(cache_blocks.SUFFIX) and name not in keep:
                os.unlink(path / name)


def name_of(data: DataRecipe, how: Format) -> str:
    """The name of a set's folder, which depends on its table of labels too: that may name other
    photos.
    """
    whole = os.path.realpath(Path(data.root or ".").expanduser())
    # a pattern or a list may be long
    name = re.sub(r"[^\w.-]+", "_", Path(whole).name)[-40:]
    key = "\0".join((whole, data.labels or "", data.image_column or "", str(how)))
    return f"{name}-{xxhash.xxh3_64_hexdigest(os.fsencode(key))}"

"""The folders of caches, one for each set and format.

<data.cache_dir>/<name of the set's folder>-<hash>/
    about.json      which set, and the format
    .used           locked by every process that reads there
    <key>.block
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

import xxhash

from trainer.data.cache import cache_blocks
from trainer.data.cache.stored import Format, Packing
from trainer.data.downloads import data_folder
from trainer.errors import SetupError
from trainer.recipe import DataRecipe
from trainer.saving import locks
from trainer.saving.files import write_atomically

ABOUT, USED = "about.json", ".used"


def parent(cache_dir: str | None) -> Path:
    """The folder of all caches."""
    return Path(cache_dir).expanduser() if cache_dir else data_folder(DataRecipe()) / "cache"


def opened(data: DataRecipe, how: Format, packing: Packing) -> tuple[Path, int]:
    """The folder of the cache of data.root, created where there is none, and its lock, to be closed.

    Blocks that hold none of today's photos are removed, unless another process uses the cache. Raises SetupError.
    """
    above = parent(data.cache_dir)
    keep = {key.tobytes().hex() + cache_blocks.SUFFIX for key in packing.keys}
    path = above / name_of(data, how)
    try:
        lock = None
        while lock is None:
            path.mkdir(parents=True, exist_ok=True)
            lock = _held(path, keep)
    except OSError as error:
        why = error.strerror or error
        raise SetupError(f"{above} cannot be written ({why}); data.cache_dir=FOLDER chooses another folder") from None
    facts = {"root": str(data.root), "format": how.layout, "size": how.size, "photos": sum(map(len, packing.paths))}
    with suppress(OSError):  # another user's, or read-only; its time is when the cache was last used
        write_atomically(path / ABOUT, json.dumps(facts, indent=1) + "\n")
    return path, lock


def _held(path: Path, keep: Set[str]) -> int | None:
    """A folder's lock, shared; None where another process removed the folder before it was locked."""
    with suppress(FileNotFoundError):
        lock = locks.open_lock(path / USED)
        if locks.lock_alone(lock):
            for name in os.listdir(path):
                if name not in keep and name.endswith((cache_blocks.SUFFIX, cache_blocks.DRAFT)):
                    with suppress(OSError):
                        os.unlink(path / name)
        locks.lock_shared(lock)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path / USED)):
                return lock
        os.close(lock)
    return None


def name_of(data: DataRecipe, how: Format) -> str:
    """The name of a set's folder, which depends on its table of labels too: that may name other photos."""
    whole = os.path.realpath(Path(data.root or ".").expanduser())
    name = re.sub(r"[^\w.-]+", "_", Path(whole).name)[-40:]  # a pattern or a list may be long
    key = "\0".join((whole, data.labels or "", data.image_column or "", str(how)))
    return f"{name}-{xxhash.xxh3_64_hexdigest(os.fsencode(key))}"

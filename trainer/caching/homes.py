"""Where caches live: a folder for each set and way of storing it, on a disk or in memory.

    <data.cache_dir>/<name of the set's folder>-<hash>/
        about.json      whose it is
        .used           locked by every process that reads there
        <key>.block

What lies in memory goes with the last process that reads it; what a killed one left there goes when the next one comes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from trainer.caching import blocks
from trainer.caching.packing import Format, Packing
from trainer.data.downloads import data_folder
from trainer.errors import SetupError
from trainer.recipe import DataRecipe
from trainer.saving import locks
from trainer.saving.run_folder import write_atomically

ABOUT, USED = "about.json", ".used"
MEMORY = "/dev/shm"


def parent(data: DataRecipe) -> Path:
    """The folder in which caches lie, for data.cache=ram or another.

    Raises:
        SetupError: this system has no disk in memory.
    """
    if data.cache != "ram":
        return Path(data.cache_dir).expanduser() if data.cache_dir else data_folder(DataRecipe()) / "cache"
    if not os.path.isdir(MEMORY):
        raise SetupError(f"data.cache=ram needs {MEMORY}, which this system has not: data.cache=disk")
    return Path(MEMORY, f"trainer-{os.getuid()}")


@dataclass
class Home:
    """The cache of one set, in use until `close`."""

    path: Path
    in_memory: bool
    lock: int

    def prune(self, packing: Packing) -> None:
        """Remove what no photo of today lies in, unless another process uses the cache."""
        if not locks.alone(self.lock):
            return
        try:
            keep = {key.tobytes().hex() + blocks.SUFFIX for key in packing.keys}
            for name in os.listdir(self.path):
                if name not in keep and name.endswith((blocks.SUFFIX, blocks.DRAFT)):
                    with suppress(OSError):
                        os.unlink(self.path / name)
        finally:
            locks.share_again(self.lock)

    def close(self) -> None:
        if self.in_memory and locks.alone(self.lock):
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # others' caches lie there
                self.path.parent.rmdir()
        os.close(self.lock)


def opened(data: DataRecipe, root: Path, how: Format) -> Home:
    """The cache of the photos under `root`, made where there is none.

    Raises:
        SetupError: it cannot be written.
    """
    above = parent(data)
    in_memory = data.cache == "ram"
    try:
        path, lock = above / name_of(root, how), None
        while lock is None:
            above.mkdir(parents=True, exist_ok=True, mode=0o700 if in_memory else 0o777)
            if in_memory:
                if os.lstat(above).st_uid != os.getuid() or above.is_symlink():
                    raise PermissionError(errno.EPERM, "it is another user's")
                with suppress(FileNotFoundError):  # the last of its readers removes it
                    sweep(above)
            lock = _held(path)
        about = {"root": str(root), "format": how.layout, "size": how.size, "channels": how.channels}
        write_atomically(path / ABOUT, json.dumps(about, indent=1) + "\n")
    except OSError as error:
        raise SetupError(
            f"{above} cannot be written ({error.strerror or error}); data.cache_dir=FOLDER chooses another folder"
        ) from None
    return Home(path, in_memory, lock)


def _held(path: Path) -> int | None:
    """A folder's lock, shared; None where the folder was swept away between our making it and our holding it."""
    with suppress(FileNotFoundError):
        path.mkdir(exist_ok=True)
        lock = locks.share(path / USED)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path / USED)):
                return lock
        os.close(lock)
    return None


def name_of(root: Path, how: Format) -> str:
    whole = os.path.realpath(root)
    name = re.sub(r"[^\w.-]+", "_", Path(whole).name)[-40:]  # of a pattern or a list not all
    return f"{name}-{xxhash.xxh3_64_hexdigest(os.fsencode(whole) + str(how).encode())}"


def sweep(above: Path) -> None:
    """Remove the caches in memory that nobody reads any more."""
    for path in above.iterdir():
        with suppress(OSError):
            if not locks.is_held(path, USED):
                shutil.rmtree(path, ignore_errors=True)

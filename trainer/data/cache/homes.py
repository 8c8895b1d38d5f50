"""The folders of caches, one for each set and format, and `python -m trainer cache`, which lists and deletes them.

<data.cache_dir>/<name of the set's folder>-<hash>/
    about.json      which set, and the format
    .used           locked by every process that reads there
    <key>.block
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Sequence, Set
from contextlib import ExitStack, suppress
from pathlib import Path

import xxhash

from trainer.data.cache import cache_blocks
from trainer.data.cache.stored import Format, Packing
from trainer.data.downloads import data_folder
from trainer.errors import FolderInUseError, RecipeError, SetupError
from trainer.processes.terminal import agreed
from trainer.recipe import DataRecipe
from trainer.recipe.recipe_files import split_words
from trainer.saving import locks
from trainer.saving.files import usable_json, why, write_atomically
from trainer.telemetry import readable
from trainer.telemetry.readable import as_size

ABOUT, USED = "about.json", ".used"
HEAD = ("cache", "photos", "size", "kept as", "last used", "of")


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
        raise unwritable(above, error) from None
    facts = {"root": str(data.root), "format": how.layout, "size": how.size, "photos": sum(map(len, packing.paths))}
    with suppress(OSError):  # another user's, or read-only; its time is when the cache was last used
        write_atomically(path / ABOUT, json.dumps(facts, indent=1) + "\n")
    return path, lock


def unwritable(folder: Path, error: OSError) -> SetupError:
    """What is said of a cache's folder."""
    return SetupError(f"{folder} cannot be written ({why(error)}); data.cache_dir=FOLDER chooses another folder")


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
        if locks.is_at(lock, path / USED):
            return lock
        os.close(lock)
    return None


def name_of(data: DataRecipe, how: Format) -> str:
    """The name of a set's folder, which depends on its table of labels too: that may name other photos."""
    whole = os.path.realpath(Path(data.root or ".").expanduser())
    name = re.sub(r"[^\w.-]+", "_", Path(whole).name)[-40:]  # a pattern or a list may be long
    key = "\0".join((whole, data.labels or "", data.image_column or "", str(how)))
    return f"{name}-{xxhash.xxh3_64_hexdigest(os.fsencode(key))}"


def command(words: Sequence[str]) -> int:
    """Returns the exit code. Raises RecipeError, FolderInUseError, SetupError."""
    task, rest = (words[0], list(words[1:])) if words and "=" not in words[0] else ("list", list(words))
    options, names = split_words(rest, ("data.cache_dir", "yes"))
    above = parent(options.get("data.cache_dir"))
    there = sorted(path.parent for path in above.glob(f"*/{ABOUT}"))
    if task == "list" and not names:
        print(table(there), end="")
    elif task == "delete" and names:
        if other := next((name for name in names if above / name not in there), None):
            known = ", ".join(path.name for path in there) or "none"
            raise RecipeError(f"'{other}' is no cache in {above}: {known}")
        delete([above / name for name in names], options.get("yes"))
    else:
        raise RecipeError(f"'{' '.join(words)[:80]}' is not understood: type cache, or cache delete NAME")
    return 0


def size_of(home: Path) -> int:
    """Bytes on the disk."""
    return sum(block.stat().st_size for block in home.glob(f"*{cache_blocks.SUFFIX}"))


def table(there: Sequence[Path]) -> str:
    """One line for each cache."""
    if not there:
        return "no caches: a run with data.cache=disk makes one\n"
    rows = [HEAD]
    for home in there:
        about = usable_json(home / ABOUT)
        photos, form, size, root = (str(about.get(key, "?")) for key in ("photos", "format", "size", "root"))
        days = (time.time() - (home / ABOUT).stat().st_mtime) / 86400
        age = "today" if days < 1 else f"{days:.0f} days ago"
        rows.append((home.name, photos, as_size(size_of(home)), f"{form} {size}", age, root))
    total = as_size(sum(map(size_of, there)))
    return "\n".join(readable.table(rows)) + f"\n\n{len(there)} cache{'s' * (len(there) != 1)}, {total}\n"


def delete(chosen: Sequence[Path], yes: str | None) -> None:
    """Remove caches once the user agrees; none where one of them is in use."""
    with ExitStack() as closing:
        for home in chosen:
            lock = locks.open_lock(home / USED)
            closing.callback(os.close, lock)
            if not locks.lock_alone(lock):
                raise FolderInUseError(f"{home.name} is in use by a run: stop that first; nothing was deleted")
        if yes != "true" and not agreed("cache delete", table(chosen).rstrip(), "delete?"):
            print("nothing was deleted")
            return
        for home in chosen:  # a run that starts now waits, and builds its cache again
            shutil.rmtree(home, ignore_errors=True)
            if home.exists():
                raise SetupError(f"{home} cannot be removed: check its owner and permissions (ls -l)")
            print(f"deleted {home.name}")

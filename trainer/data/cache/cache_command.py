"""`python -m trainer cache`: lists, builds and deletes caches."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data import open_datasets
from trainer.data.cache import cache_blocks, homes
from trainer.data.cache.cached_set import cached
from trainer.errors import FolderInUseError, RecipeError, SetupError
from trainer.models.inputs import with_pretrained_input
from trainer.processes.resources import locate
from trainer.processes.terminal import agreed
from trainer.recipe import DataRecipe, load
from trainer.recipe.known_names import OWN_PHOTOS
from trainer.recipe.recipe_files import split_words
from trainer.saving import files, locks
from trainer.telemetry import readable
from trainer.telemetry.readable import as_size

USAGE = "type cache, cache build recipe=NAME data.root=FOLDER or cache delete NAME"
BUILD = "cache build recipe=finetune data.root={}"
HEAD = ("cache", "photos", "size", "kept as", "last used", "of")


@dataclass(frozen=True)
class CacheFacts:
    """A cache on this machine."""

    path: Path
    size: int  # bytes on the disk
    used: float  # when a process last opened it, in seconds since 1970
    about: dict[str, Any]  # the contents of `homes.ABOUT`


def command(words: Sequence[str]) -> int:
    """Returns the exit code. Raises RecipeError, FolderInUseError, SetupError, DiskFullError, PeerError."""
    task, rest = (words[0], list(words[1:])) if words and "=" not in words[0] else ("list", list(words))
    if task in ("build", "make", "create"):
        return build(rest)
    options, names = split_words(rest, ("data.cache_dir", "yes"))
    there = list(caches(options.get("data.cache_dir")))
    if task in ("list", "ls") and not names:
        print(table(there), end="")
        return 0
    if task in ("delete", "rm", "remove"):
        if not names:
            raise RecipeError("cache delete needs names, as in cache delete NAME; cache lists them")
        delete(chosen(there, names), options.get("yes"))
        return 0
    raise RecipeError(f"'{' '.join(words)[:80]}' is not understood: {USAGE}")


def build(words: Sequence[str]) -> int:
    """Build the cache of a recipe's photos, as training would."""
    options, rest = split_words(words, ("recipe",))
    recipe = load(options.get("recipe"), *rest)
    recipe = with_pretrained_input(recipe.replace(data__cache="disk"))
    data = open_datasets(recipe)
    alone = locate(load(None, "mode=single", "devices=[cpu]"))
    with ExitStack() as closing:
        after, _ = cached(data, recipe, alone, print, closing)
    if after is data:
        photos = recipe.data.name in OWN_PHOTOS
        example = "" if photos else f": for your photos, {BUILD.format(recipe.data.root or 'FOLDER')}"
        raise RecipeError(f"the images of data.name={recipe.data.name} are in memory and need no cache{example}")
    return 0


def caches(folder: str | None) -> Iterator[CacheFacts]:
    """All caches in a folder; None: in the default one."""
    above = homes.parent(DataRecipe(cache_dir=folder))
    if above.is_dir():
        yield from (facts(path) for path in sorted(above.iterdir()) if (path / homes.ABOUT).is_file())


def facts(path: Path) -> CacheFacts:
    size = sum(block.stat().st_size for block in path.glob(f"*{cache_blocks.SUFFIX}"))
    return CacheFacts(path, size, (path / homes.ABOUT).stat().st_mtime, files.usable_json(path / homes.ABOUT))


def table(listed: Sequence[CacheFacts]) -> str:
    """One line for each cache."""
    if not listed:
        return f"no caches: with data.cache=disk a run makes one, as {BUILD.format('FOLDER')} does beforehand\n"
    rows = [HEAD]
    for cache in listed:
        form = f"{cache.about.get('format', '?')} {cache.about.get('size', '?')}"
        days = (time.time() - cache.used) / 86400
        age = "today" if days < 1 else f"{days:.0f} days ago"
        photos, root = (str(cache.about.get(key, "?")) for key in ("photos", "root"))
        rows.append((cache.path.name, photos, as_size(cache.size), form, age, root))
    total = sum(cache.size for cache in listed)
    return "\n".join(readable.table(rows)) + f"\n\n{len(listed)} cache{'s' * (len(listed) != 1)}, {as_size(total)}\n"


def chosen(there: Sequence[CacheFacts], names: Sequence[str]) -> list[CacheFacts]:
    """The caches of these names, or of their beginnings."""
    caches = []
    for name in names:
        fitting = [cache for cache in there if name in (cache.path.name, str(cache.path))]
        fitting = fitting or [cache for cache in there if cache.path.name.startswith(name)]
        if len(fitting) != 1:
            known = ", ".join(cache.path.name for cache in fitting or there) or "none"
            raise RecipeError(f"'{name}' is {'several caches' if fitting else 'no cache'}: {known}")
        caches += fitting
    return caches


def delete(listed: Sequence[CacheFacts], yes: str | None) -> None:
    """Remove caches once the user agrees; none where one of them is in use."""
    with ExitStack() as closing:
        for cache in listed:
            lock = locks.open_lock(cache.path / homes.USED)
            closing.callback(os.close, lock)
            if not locks.lock_alone(lock):
                raise FolderInUseError(f"{cache.path.name} is in use by a run: stop that first; nothing was deleted")
        if yes != "true" and not agreed("cache delete", table(listed).rstrip(), "delete?"):
            print("nothing was deleted")
            return
        for cache in listed:  # a run that starts now waits, and builds its cache again
            shutil.rmtree(cache.path, ignore_errors=True)
            if cache.path.exists():
                raise SetupError(f"{cache.path} cannot be removed: check its owner and permissions (ls -l)")
            print(f"deleted {cache.path.name} ({as_size(cache.size)})")

"""`python -m trainer cache`: the caches there are; making one beforehand, looking for damage, removing them."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data import open_datasets
from trainer.data.cache import cache_blocks, homes
from trainer.data.cache.cached_set import cached
from trainer.errors import FolderInUseError, Interrupted, RecipeError, SetupError
from trainer.models.inputs import with_own_input
from trainer.processes.resources import locate
from trainer.recipe import DataRecipe, load
from trainer.recipe.known_names import OWN_PHOTOS
from trainer.recipe.recipe_words import split_words
from trainer.saving import files, locks
from trainer.telemetry import readable
from trainer.telemetry.readable import as_size

USAGE = "type cache, cache build recipe=NAME data.root=FOLDER, cache verify NAME or cache delete NAME"
BUILD = "cache build recipe=finetune data.root={}"
HEAD = ("cache", "photos", "size", "kept as", "last used", "of")


@dataclass(frozen=True)
class CacheFacts:
    """A cache on this machine.

    Attributes:
        size: bytes on the disk.
        photos: that it holds.
        used: when a process last opened it, in seconds since 1970.
        about: what `homes.ABOUT` says.
    """

    path: Path
    size: int
    photos: int
    used: float
    about: dict[str, Any]


def command(words: Sequence[str]) -> int:
    """Returns the exit code.

    Raises:
        RecipeError: words that mean nothing, or a name that is no cache's.
        FolderInUseError: a cache that is to be deleted is in use.
        SetupError, DiskFullError, PeerError: a folder cannot be read or written.
    """
    task, rest = (words[0], list(words[1:])) if words and "=" not in words[0] else ("list", list(words))
    if task in ("build", "make", "create"):
        return build(rest)
    own, names = split_words(rest, ("data.cache_dir", "yes"))
    unknown = [name for name in names if "=" in name or name.startswith("-")]
    if unknown:
        raise RecipeError(f"'{unknown[0]}' is not a word of cache {task}: {USAGE}")
    homes.sweep()
    there = list(caches(own.get("data.cache_dir")))
    if task in ("list", "ls") and not names:
        print(table(there), end="")
        return 0
    if task in ("verify", "check"):
        return verify(chosen(there, names) if names else there)
    if task in ("delete", "rm", "remove"):
        if not names:
            raise RecipeError("cache delete needs names, as in cache delete NAME; cache lists them")
        delete(chosen(there, names), own.get("yes"))
        return 0
    raise RecipeError(f"'{' '.join(words)[:80]}' is not understood: {USAGE}")


def build(words: Sequence[str]) -> int:
    """Make the cache of a recipe's photos, as training would."""
    recipe = load(None, *words) if not any(word.startswith("recipe=") for word in words) else _recipe(words)
    if recipe.data.cache == "ram":
        raise RecipeError("data.cache=ram lasts as long as a run: it is made when that begins; data.cache=disk stays")
    recipe = recipe.replace(data__cache="disk")
    recipe = with_own_input(recipe)
    data = open_datasets(recipe)
    alone = locate(load(None, "mode=single", "devices=[cpu]"))
    with ExitStack() as closing:
        after, _ = cached(data, recipe, alone, print, closing)
    if after is data:
        photos = recipe.data.name in OWN_PHOTOS
        own = "" if photos else f": of your photos, {BUILD.format(recipe.data.root or 'FOLDER')}"
        raise RecipeError(
            f"the images of data.name={recipe.data.name} lie in memory as they are, and there is nothing to cache{own}"
        )
    return 0


def _recipe(words: Sequence[str]) -> Any:
    own, rest = split_words(list(words), ("recipe",))
    return load(own["recipe"], *rest)


def caches(wanted: str | None) -> Iterator[CacheFacts]:
    """All caches on the disk and in memory, in the folder that is `wanted`, the usual one where that is None."""
    above = {homes.parent(DataRecipe(cache_dir=wanted))}
    if wanted is None and os.path.isdir(homes.MEMORY):
        above.add(homes.parent(DataRecipe(cache="ram")))
    for folder in sorted(above):
        if folder.is_dir():
            for path in sorted(folder.iterdir()):
                if (path / homes.ABOUT).is_file():
                    yield looked_at(path)


def looked_at(path: Path) -> CacheFacts:
    size = photos = 0
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.endswith(cache_blocks.SUFFIX):
                size += entry.stat().st_size
                photos += cache_blocks.count(entry.path)
    about = files.usable_json(path / homes.ABOUT)
    return CacheFacts(path, size, photos, (path / homes.ABOUT).stat().st_mtime, about)


def table(found: Sequence[CacheFacts]) -> str:
    """One line a cache."""
    if not found:
        return f"no caches: with data.cache=disk a run makes one, as {BUILD.format('FOLDER')} does beforehand\n"
    rows = [HEAD]
    for one in found:
        kept = f"{one.about.get('format', '?')} {one.about.get('size', '?')}"
        days = (time.time() - one.used) / 86400
        age = "today" if days < 1 else f"{days:.0f} days ago"
        rows.append((one.path.name, f"{one.photos:,}", as_size(one.size), kept, age, str(one.about.get("root", "?"))))
    total = sum(one.size for one in found)
    return "\n".join(readable.table(rows)) + f"\n\n{len(found)} cache{'s' * (len(found) != 1)}, {as_size(total)}\n"


def chosen(there: Sequence[CacheFacts], names: Sequence[str]) -> list[CacheFacts]:
    """Those of the names, each the whole or the beginning of one."""
    found = []
    for name in names:
        fitting = [one for one in there if one.path.name == name or str(one.path) == name]
        fitting = fitting or [one for one in there if one.path.name.startswith(name)]
        if len(fitting) != 1:
            known = ", ".join(one.path.name for one in fitting or there) or "none"
            raise RecipeError(f"'{name}' is {'several caches' if fitting else 'no cache'}: {known}")
        found += fitting
    return found


def verify(found: Sequence[CacheFacts]) -> int:
    """Read every photo; damaged blocks are removed, to be made anew when the cache is next used.

    Returns 3 where there were any, as the exit code.
    """
    worst = 0
    for one in found:
        right = damaged = 0
        for path in sorted(one.path.glob(f"*{cache_blocks.SUFFIX}")):
            try:
                right += cache_blocks.verified(path)
            except FileNotFoundError:  # a run has just put another in its place
                continue
            except (cache_blocks.DamagedError, ValueError, OSError):  # a disk that reads wrong, too
                damaged += 1
                with suppress(OSError):
                    path.unlink()
        told = f"{damaged} damaged blocks removed: they are made anew when it is next used" if damaged else "no damage"
        print(f"{one.path.name}: {right:,} photos are right, {told}")
        worst = max(worst, 3 * bool(damaged))
    if not found:
        print("no caches")
    return worst


def delete(found: Sequence[CacheFacts], yes: str | None) -> None:
    """Remove caches once the user agrees; none where one of them is in use."""
    with ExitStack() as closing:
        for one in found:
            held = locks.open_lock(one.path / homes.USED)
            closing.callback(os.close, held)
            if not locks.lock_alone(held):
                raise FolderInUseError(f"{one.path.name} is in use by a run: stop that first; nothing was deleted")
        if yes != "true":
            if sys.stdin is None or not sys.stdin.isatty():
                raise RecipeError("cache delete asks before it deletes, and nobody is there to answer: add yes=true")
            print(table(found), end="")
            try:
                if input("delete? y/N ").strip().lower() not in ("y", "yes"):
                    print("nothing was deleted")
                    return
            except (EOFError, KeyboardInterrupt):
                raise Interrupted("stopped; nothing was deleted") from None
        for one in found:  # a run that begins now waits, and makes its cache anew
            shutil.rmtree(one.path, ignore_errors=True)
            if one.path.exists():
                raise SetupError(f"{one.path} cannot be removed: look at its owner and rights (ls -l)")
            print(f"deleted {one.path.name} ({as_size(one.size)})")

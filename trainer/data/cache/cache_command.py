"""`python -m trainer cache`: lists and deletes caches."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from trainer.data.cache import cache_blocks, homes
from trainer.errors import FolderInUseError, RecipeError, SetupError
from trainer.processes.terminal import agreed
from trainer.recipe.recipe_files import split_words
from trainer.saving import files, locks
from trainer.telemetry import readable
from trainer.telemetry.readable import as_size

HEAD = ("cache", "photos", "size", "kept as", "last used", "of")


def command(words: Sequence[str]) -> int:
    """Returns the exit code. Raises RecipeError, FolderInUseError, SetupError."""
    task, rest = (words[0], list(words[1:])) if words and "=" not in words[0] else ("list", list(words))
    options, names = split_words(rest, ("data.cache_dir", "yes"))
    above = homes.parent(options.get("data.cache_dir"))
    there = sorted(path.parent for path in above.glob(f"*/{homes.ABOUT}"))
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
        about = files.usable_json(home / homes.ABOUT)
        photos, form, size, root = (str(about.get(key, "?")) for key in ("photos", "format", "size", "root"))
        days = (time.time() - (home / homes.ABOUT).stat().st_mtime) / 86400
        age = "today" if days < 1 else f"{days:.0f} days ago"
        rows.append((home.name, photos, as_size(size_of(home)), f"{form} {size}", age, root))
    total = as_size(sum(map(size_of, there)))
    return "\n".join(readable.table(rows)) + f"\n\n{len(there)} cache{'s' * (len(there) != 1)}, {total}\n"


def delete(chosen: Sequence[Path], yes: str | None) -> None:
    """Remove caches once the user agrees; none where one of them is in use."""
    with ExitStack() as closing:
        for home in chosen:
            lock = locks.open_lock(home / homes.USED)
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

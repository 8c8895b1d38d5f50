"""Command `cache`, which lists and deletes caches of photos."""

import errno
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from trainer.data.cache.homes import ABOUT, USED, parent
from trainer.errors import FolderInUseError, RecipeError, SetupError
from trainer.processes.terminal import ask_permission
from trainer.recipe import split_arguments
from trainer.saving import locks
from trainer.saving.files import describe_error, measure_size, read_json_or_empty
from trainer.telemetry import readable
from trainer.telemetry.readable import format_size

# Head of the table of caches. "kept as" is the format and size of the stored images, and "of" is
# the folder of the original photos.
HEAD = ("cache", "photos", "size", "kept as", "last used", "of")


def command(words: Sequence[str]) -> int:
    """List the caches, or delete some of them, and return the exit code.

    Args:
        words: Arguments of the command line.

    Raises:
        RecipeError: An argument is not allowed, or names no cache.
        FolderInUseError: A cache to delete is in use.
        SetupError: A cache cannot be removed.
    """
    task = "list"
    rest = list(words)
    if rest and "=" not in rest[0]:
        task = rest.pop(0)
    options, names = split_arguments(rest, ("data.cache_dir", "yes"))
    above = parent(options.get("data.cache_dir"))
    caches = sorted(path.parent for path in above.glob(f"*/{ABOUT}"))
    if task == "list" and not names:
        print(format_table(caches), end="")
    elif task == "delete" and names:
        for name in names:
            if above / name not in caches:
                known = ", ".join(path.name for path in caches) or "none"
                raise RecipeError(f"'{name}' is no cache in {above}: {known}")
        delete([above / name for name in dict.fromkeys(names)], options.get("yes"))
    else:
        raise RecipeError(
            f"'{' '.join(words)[:80]}' is not understood: type cache, or cache delete NAME"
        )
    return 0


def format_table(caches: Sequence[Path]) -> str:
    """Format a table with a line for each cache and the total size."""
    if not caches:
        return "no caches: a run with data.cache=disk makes one\n"
    rows = [HEAD]
    total = 0
    for cache in caches:
        about = read_json_or_empty(cache / ABOUT)
        photos, form, size, root = (
            str(about.get(key, "?")) for key in ("photos", "format", "size", "root")
        )
        # A cache that another process has deleted since it was listed gets no row.
        with suppress(FileNotFoundError):
            days = (time.time() - os.path.getmtime(cache / ABOUT)) / 86400
            stored = measure_size(cache)
            age = "today" if days < 1 else f"{days:.0f} days ago"
            rows.append((cache.name, photos, format_size(stored), f"{form} {size}", age, root))
            total += stored
    count = len(rows) - 1
    lines = [
        *readable.format_table(rows),
        "",
        f"{readable.format_count(count, 'cache')}, {format_size(total)}\n",
    ]
    return "\n".join(lines)


def delete(caches: Sequence[Path], yes: str | None) -> None:
    """Delete caches if `yes` is "true" or the user agrees. If any cache is in use, delete none."""
    with ExitStack() as closing:
        for cache in caches:
            # A cache that another process has deleted meanwhile needs no lock.
            with suppress(FileNotFoundError):
                lock = locks.open_lock(cache / USED)
                closing.callback(os.close, lock)
                # A run may have deleted the directory and created it again, with a new lock file.
                # Then the lock on the old file protects nothing.
                if not locks.try_exclusive_lock(lock) or not locks.is_at(lock, cache / USED):
                    raise FolderInUseError(
                        f"{cache.name} is in use by a run: stop that first; nothing was deleted"
                    )
        if yes != "true" and not ask_permission(
            "cache delete", format_table(caches).rstrip(), "delete?"
        ):
            print("nothing was deleted")
            return
        for cache in caches:
            try:
                # Remove the lock file last. Until then, a run that starts now waits for the lock.
                # Afterwards, it builds its cache again.
                for name in sorted(os.listdir(cache), key=USED.__eq__):
                    (cache / name).unlink(missing_ok=True)
                cache.rmdir()
            except FileNotFoundError:
                pass
            except OSError as error:
                # If the directory is not empty, a new run has started to use it, so keep it.
                if error.errno != errno.ENOTEMPTY:
                    raise SetupError(
                        f"{cache} cannot be removed ({describe_error(error)}): check its owner and "
                        "permissions (ls -l)"
                    ) from None
            print(f"deleted {cache.name}")

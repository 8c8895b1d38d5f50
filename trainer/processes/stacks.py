"""Write stacks and tracebacks to a file of the run folder instead of the screen.

If the run has no folder yet, or if the file cannot be written, `dump` writes stacks to stderr, and
`append` writes nothing and returns None.
"""

import faulthandler
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from trainer.processes.rank import read_place

# The folder of the current run, or an empty list. A list can be changed without `global`.
_folders: list[Path] = []


def write_to(folder: str | Path | None) -> None:
    """Set the folder for stacks. None selects stderr."""
    _folders.clear()
    if folder is not None:
        _folders.append(Path(folder).absolute())


def append(text: str) -> Path | None:
    """Append a traceback to this rank's file.

    Returns:
        The path of the file, or None if it could not be written.
    """
    return _write("", lambda file: file.write(f"{text.rstrip()}\n"))


def dump(why: str) -> str:
    """Write the stacks of all threads.

    Args:
        why: reason, which becomes the title of the entry.

    Returns:
        The end of a message, which names the file; empty if the stacks were written to stderr.
    """
    path = _write(f": {why}", faulthandler.dump_traceback)
    if path is not None:
        return f"; what it was doing is in {path}"
    # Without stderr, which a daemon may have closed, the stacks are lost.
    with suppress(AttributeError, ValueError, OSError):
        faulthandler.dump_traceback()
    return ""


def _write(title: str, content: Callable[[TextIO], object]) -> Path | None:
    """Append an entry to this rank's file, and return the file's path.

    Returns None if the run has no folder or the file cannot be written.
    """
    for folder in _folders:
        path = folder / f"stacks-rank{read_place().rank}.txt"
        with suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {read_place().rank}{title}\n")
            file.flush()
            content(file)
            file.write("\n")
            return path
    return None

"""Where stacks go: into a file of the run folder, so that the screen keeps to sentences.

Before a run has its folder, or where its disk cannot be written, they go to stderr.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from trainer.processes.rank import place

_folders: list[Path] = []  # of the run that this process trains: one or none


def write_to(folder: str | Path | None) -> None:
    """From now on stacks go to files in this folder; None: to stderr."""
    _folders[:] = [] if folder is None else [Path(folder).absolute()]


def append(text: str) -> Path | None:
    """Add a traceback to this rank's file; the file, or None where there is none to write."""
    return _write("", lambda file: file.write(f"{text.rstrip()}\n"))


def dump(why: str) -> str:
    """Write the stacks of all threads; words that say in which file, empty where they went to stderr."""
    path = _write(f": {why}", lambda file: faulthandler.dump_traceback(file, all_threads=True))
    if path is not None:
        return f"; what it was doing is in {path}"
    with suppress(AttributeError, ValueError, OSError):  # stderr may be closed
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
    return ""


def _write(title: str, content: Callable[[TextIO], object]) -> Path | None:
    """Add an entry to the file of the run folder, if there is one."""
    for folder in _folders:
        path = folder / f"stacks-rank{place().rank}.txt"
        with suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {place().rank}{title}\n")
            file.flush()
            content(file)
            file.write("\n")
            return path
    return None

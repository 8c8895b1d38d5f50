"""Where stacks go: into a file of the run folder, so that the screen keeps to sentences.

Before a run has its folder, or where its disk cannot be written, they go to stderr.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from contextlib import suppress
from pathlib import Path

from trainer.processes.rank import place

_folders: list[Path] = []  # of the run that this process trains: one or none


def write_to(folder: str | Path | None) -> None:
    """From now on stacks go to files in this folder; None: to stderr."""
    _folders[:] = [] if folder is None else [Path(folder).absolute()]


def append(text: str) -> Path | None:
    """Add a traceback to this rank's file; the file, or None where there is none to write."""
    for path in _files():
        with suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(f"{_head()}\n{text.rstrip()}\n\n")
            return path
    return None


def dump(why: str) -> str:
    """Write the stacks of all threads; words that say in which file, empty where they went to stderr."""
    for path in _files():
        with suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(f"{_head()}: {why}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\n")
            return f"; what it was doing is in {path}"
    with suppress(AttributeError, ValueError, OSError):  # stderr may be closed
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
    return ""


def _files() -> list[Path]:
    return [folder / f"stacks-rank{place().rank}.txt" for folder in _folders if folder.is_dir()]


def _head() -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {place().rank}"

"""Keys and values that are no more: files that have them are read as before, words that have them are refused."""

from __future__ import annotations

from typing import NamedTuple


class Removed(NamedTuple):
    """What became of a key, or of one value of it."""

    sentence: str  # what to do instead
    instead: str = ""  # the word, key=value, that takes its place in a file; empty: it is left out
    same: bool = True  # computes the same: a run goes on; else its weights are used, and it is not continued


REMOVED: dict[str, Removed] = {
    "data.workers=auto": Removed("leave it out for a process per core, or give a number", "data.workers=null"),
    "data.cache=ram": Removed(
        "data.cache=disk with data.cache_dir=/dev/shm/FOLDER keeps it in memory", "data.cache=disk"
    ),
    "data.cache=auto": Removed("data.cache=disk keeps a copy, and says so where there is no room", "data.cache=disk"),
}  # by "key" or "key=value"

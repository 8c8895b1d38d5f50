"""Keys and values that are no more: files that have them are read as before, words that have them are refused."""

from __future__ import annotations

from typing import NamedTuple


class Removed(NamedTuple):
    """What became of a key, or of one value of it."""

    sentence: str  # what to do instead
    instead: str = ""  # the word, key=value, that takes its place in a file; empty: it is left out
    same: bool = True  # computes the same: a run goes on; else its weights are used, and it is not continued


REMOVED: dict[str, Removed] = {}  # by "key" or "key=value"

"""Keys and values that are no more: files that have them are read as before, words that have them are refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from trainer.errors import RecipeError
from trainer.recipe.recipe_files import word_value
from trainer.recipe.text import flatten, shown, typed


class Removed(NamedTuple):
    """What became of a key, or of one value of it."""

    sentence: str  # what to do instead
    instead: str = ""  # the word, key=value, that takes its place in a file; empty: it is left out
    same: bool = True  # computes the same: a run goes on; else its weights are used, and it is not continued
    idle: str = ""  # of a key: the value that did nothing, its default; every old run folder has it, and none is told


REMOVED: dict[str, Removed] = {  # by "key" or "key=value"
    "data.workers=auto": Removed("leave it out for a process per core, or give a number", "data.workers=null"),
    "data.cache=ram": Removed(
        "data.cache=disk with data.cache_dir=/dev/shm/FOLDER keeps it in memory", "data.cache=disk"
    ),
    "data.cache=auto": Removed("data.cache=disk keeps a copy, and says so where there is no room", "data.cache=disk"),
    "data.check=full": Removed(
        "data.check=headers looks at the ends of each file; checksums compared with the originals' find other damage",
        "data.check=headers",
    ),
    "optimizer.name=lars": Removed(
        "use optimizer.name=sgd, with optimizer.lr_per and schedule.warmup_epochs for large batches",
        "optimizer.name=sgd",
        same=False,
    ),
    "optimizer.trust": Removed("leave it out: it was for optimizer.name=lars", idle="0.001"),
    "on_nonfinite": Removed(
        "a run stops at a loss or gradient that is not finite; lower optimizer.lr, or type clip_grad_norm=1",
        idle="stop",
    ),
    "resume_weights_only": Removed(
        "recipe=RUN model.init_from=RUN trains its weights with another optimizer", idle="false"
    ),
    "pipeline.recompute=true": Removed("recompute=true is for every mode", "recompute=true"),
    "pipeline.recompute": Removed("leave it out, or type recompute=false, for every mode", idle="false"),
    "save.every": Removed("save.every_steps=500 saves within epochs", idle="null"),
    "save.mttf_hours": Removed("leave it out: no run chooses by itself when to save", idle="24.0"),
}
_told: set[tuple[str, str]] = set()


def removed(tree: Mapping[Any, Any]) -> Iterator[tuple[str, str, Removed]]:
    """What of a recipe is no more: its key, the word key=value, and what became of it."""
    for key, value in flatten(tree).items():
        word = f"{key}={typed(value)}"
        if (row := REMOVED.get(word) or REMOVED.get(key)) is not None:
            yield key, word, row


def refuse_removed(tree: Mapping[Any, Any]) -> None:
    """Raises RecipeError where somebody typed what is no more."""
    for _, word, row in removed(tree):
        raise RecipeError(f"{shown(word)} is no more: {row.sentence}")


def without_removed(tree: dict[Any, Any], label: str) -> dict[Any, Any]:
    """What a file holds, as it is read today: one line each says what is no more, once in a process."""
    for key, word, row in removed(tree):
        tree = _without(tree, key.split("."))
        if row.instead:
            chosen, _, value = row.instead.partition("=")
            tree = _with(tree, chosen.split("."), word_value(chosen, value))
        if not _idle(word, row) and (label, word) not in _told:
            _told.add((label, word))
            became = f"read as {row.instead}" if row.instead else "left out"
            otherwise = ", which computes otherwise" if not row.same else ""
            _tell(f"{label}: {shown(word)} is no more, and {became}{otherwise}: {row.sentence}")
    return tree


def computed_otherwise(tree: Mapping[Any, Any]) -> str | None:
    """The word of what a run was trained with that nothing computes any more."""
    return next((word for _, word, row in removed(tree) if not row.same and not _idle(word, row)), None)


def _idle(word: str, row: Removed) -> bool:
    return bool(row.idle) and word.endswith(f"={row.idle}")


def _without(tree: Mapping[Any, Any], path: Sequence[str]) -> dict[Any, Any]:
    """A copy without a key, and without the section that it leaves empty."""
    name, *rest = path
    inner = _without(tree[name], rest) if rest else {}
    others = {key: value for key, value in tree.items() if key != name}
    return {**tree, name: inner} if inner else others


def _with(tree: Mapping[Any, Any], path: Sequence[str], value: Any) -> dict[Any, Any]:
    name, *rest = path
    return {**tree, name: _with(tree.get(name, {}), rest, value) if rest else value}


def _tell(line: str) -> None:
    """Of several ranks the first one does, or our launcher, which has read the same."""
    if "TRAINER_LAUNCHER" not in os.environ and os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # the terminal may be gone
            print(f"trainer: {line}", file=sys.stderr, flush=True)

"""Keys and values that were removed. Files with them are still read; arguments are refused."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from trainer.errors import RecipeError
from trainer.recipe.recipe_files import parse_value
from trainer.recipe.text import flatten, format_value, format_yaml, with_value


class Removed(NamedTuple):
    """Replacement of a removed key or value.

    Attributes:
        sentence: what to do instead.
        instead: `key=value` that replaces the removed key in a file; empty to leave the key out.
        same: True if the replacement computes the same results, so that a run can be resumed. If
            False, only the run's weights can be used.
        idle: default value of a removed key. Every old run folder contains the key with this value,
            which had no effect, so it is not reported. Empty if only a value was removed.
    """

    sentence: str
    instead: str = ""
    same: bool = True
    idle: str = ""


# Removed "key" or "key=value" -> its replacement.
REMOVED = {
    "data.workers=auto": Removed(
        "leave it out for a process per core, or give a number", "data.workers=null"
    ),
    "data.cache=ram": Removed(
        "data.cache=disk with data.cache_dir=/dev/shm/FOLDER keeps it in memory", "data.cache=disk"
    ),
    "data.cache=auto": Removed(
        "data.cache=disk keeps a copy, and says so where there is no room", "data.cache=disk"
    ),
    "data.check=full": Removed(
        "data.check=headers looks at the ends of each file; checksums compared with the originals' "
        "find other damage",
        "data.check=headers",
    ),
    "optimizer.name=lars": Removed(
        "optimizer.name=timm:lars trains with LARS, and needs timm",
        "optimizer.name=sgd",
        same=False,
    ),
    "optimizer.trust": Removed(
        "trust_coeff in optimizer.args sets it for optimizer.name=timm:lars", idle="0.001"
    ),
    "on_nonfinite": Removed(
        "a run stops at a loss or gradient that is not finite; lower optimizer.lr, or type "
        "clip_grad_norm=1",
        idle="stop",
    ),
    "resume_weights_only": Removed(
        "recipe=RUN model.init_from=RUN trains its weights with another optimizer", idle="false"
    ),
    "pipeline.recompute=true": Removed("recompute=true is for every mode", "recompute=true"),
    "pipeline.recompute": Removed(
        "leave it out, or type recompute=false, for every mode", idle="false"
    ),
    "save.every": Removed("save.every_steps=500 saves within epochs", idle="null"),
    "save.mttf_hours": Removed("leave it out: no run chooses by itself when to save", idle="24.0"),
}
# Pairs (label of a file, argument) that this process has already reported.
_reported: set[tuple[str, str]] = set()


def find_removed(tree: Mapping[Any, Any]) -> Iterator[tuple[str, str, Removed]]:
    """Yield the removed keys of a recipe, each with its argument `key=value` and replacement."""
    for key, value in flatten(tree).items():
        argument = f"{key}={format_yaml(value)}"
        row = REMOVED.get(argument) or REMOVED.get(key)
        if row is not None:
            yield key, argument, row


def refuse_removed(tree: Mapping[Any, Any]) -> None:
    """Refuse removed keys and values. Use this for a tree that the user typed.

    Raises:
        RecipeError: the tree contains a removed key or value.
    """
    for _, argument, row in find_removed(tree):
        raise RecipeError(f"{format_value(argument)} is no more: {row.sentence}")


def replace_removed(tree: dict[Any, Any], label: str) -> dict[Any, Any]:
    """Replace the removed keys of a file, and report each of them once per process.

    Args:
        tree: keys of the file.
        label: name of the file in messages.
    """
    for key, argument, row in find_removed(tree):
        tree = _without(tree, key.split("."))
        change = "left out"
        if row.instead:
            new_key, _, value = row.instead.partition("=")
            tree = with_value(tree, new_key.split("."), parse_value(new_key, value))
            change = f"read as {row.instead}"
        if not row.same:
            change += ", which computes otherwise"
        if not _idle(argument, row) and (label, argument) not in _reported:
            _reported.add((label, argument))
            line = f"{label}: {format_value(argument)} is no more, and {change}: {row.sentence}"
            # Our launcher and all ranks read the same recipe, so only one process prints the line:
            # the launcher, or rank 0 if there is no launcher.
            if "TRAINER_LAUNCHER" not in os.environ and os.environ.get("RANK", "0") == "0":
                # The terminal may have been closed.
                with suppress(OSError):
                    print(f"trainer: {line}", file=sys.stderr, flush=True)
    return tree


def find_changed_setting(tree: Mapping[Any, Any]) -> str | None:
    """Return the first removed argument whose replacement computes other results, or None."""
    for _, argument, row in find_removed(tree):
        if not row.same and not _idle(argument, row):
            return argument
    return None


def _idle(argument: str, row: Removed) -> bool:
    """Return whether a removed argument has the default value of its key, which had no effect."""
    return bool(row.idle) and argument.endswith(f"={row.idle}")


def _without(tree: Mapping[Any, Any], path: Sequence[str]) -> dict[Any, Any]:
    """Return a copy without the key at `path`, and without its section if this was its only key."""
    name, *rest = path
    copy = dict(tree)
    if rest:
        copy[name] = _without(tree[name], rest)
    if not rest or not copy[name]:
        del copy[name]
    return copy

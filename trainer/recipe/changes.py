"""What a continued run may change of its recipe."""

from __future__ import annotations

from typing import Any

from trainer.recipe.schema import Recipe
from trainer.recipe.text import flatten

# What a continued run may change: where it runs, what it writes and how patient it is, never what a step computes.
FREE_ON_RESUME = {"mode", "devices", "threads", "timeout", "save", "logging", "resume", "output", "pipeline", "predict"}
FREE_ON_RESUME |= {
    "stop",
    "grace",
    "resume_weights_only",
    "data.root",
    "data.workers",
    "data.download",
    "data.cache_dir",
}


def changed_keys(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two recipes differ and a continued run may not, with (old, new) values."""
    was, now = flatten(old.to_dict()), flatten(new.to_dict())

    free = FREE_ON_RESUME | ({"optimizer"} if new.resume_weights_only else set())
    if old.data.cache_format is not None:  # wherever the pixels lie, they are those of that cache
        free |= {"data.cache"}

    def fixed(key: str) -> bool:
        return key not in free and key.split(".")[0] not in free

    return {key: (was[key], now[key]) for key in now if fixed(key) and was[key] != now[key]}

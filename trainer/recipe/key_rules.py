"""Which keys have no effect together with others, and which a continued run may change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainer.errors import RecipeError
from trainer.recipe.schema import Recipe
from trainer.recipe.text import flatten, typed

READERS = {
    "optimizer.momentum": ("sgd", "muon", "lars"),
    "optimizer.nesterov": ("sgd", "muon"),
    "optimizer.betas": ("adam", "adamw", "muon"),
    "optimizer.eps": ("adam", "adamw", "muon"),
    "optimizer.trust": ("lars",),
    "schedule.min_lr": ("cosine",),
    "schedule.step_epochs": ("step",),
    "schedule.gamma": ("step",),
}  # keys that some optimizers or schedules read, by their `name`
# What a continued run may change: where it runs, what it writes and how patient it is, never what a step computes.
FREE_ON_RESUME = {
    "mode", "devices", "threads", "timeout", "save", "logging", "resume", "output", "pipeline", "fsdp", "predict",
    "stop", "grace", "resume_weights_only", "data.root", "data.workers", "data.download", "data.cache_dir",
}  # fmt: skip


def unread(values: Mapping[str, Any], keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Those of the keys that nothing reads, each with the key whose value decides. `values`: of all keys."""
    for key in keys:
        chooser = f"{key.partition('.')[0]}.name"
        if key in READERS and values[chooser] not in READERS[key]:
            yield key, chooser


def check_read(recipe: Recipe, keys: Iterable[str]) -> None:
    """Refuse keys that the user typed and nothing reads; those of a file may be for other words on top of it.

    Raises:
        RecipeError: with what to type instead.
    """
    values = flatten(recipe.to_dict())
    for key, chooser in unread(values, (key for key in keys if values.get(key))):
        raise RecipeError(
            f"{key}={typed(values[key])} does nothing with {chooser}={values[chooser]}: leave it out, "
            f"or type {chooser}={' or '.join(READERS[key])}"
        )


def changed_keys(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two recipes differ and a continued run may not, with (old, new) values."""
    before, now = flatten(old.to_dict()), flatten(new.to_dict())
    free = FREE_ON_RESUME | ({"optimizer"} if new.resume_weights_only else set())
    if old.data.cache_format is not None:  # the pixels are those of that cache, wherever they are kept
        free |= {"data.cache"}
    changed = {key: (before[key], value) for key, value in now.items() if before[key] != value}
    return {key: values for key, values in changed.items() if not {key, key.partition(".")[0]} & free}

"""Words that other words leave without effect, as `optimizer.nesterov=true` for an optimizer that has no such thing."""

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


def unread(values: Mapping[str, Any], said: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Those of the keys `said` that nothing reads, each with the key whose value decides. `values`: of all keys."""
    for key in said:
        chooser = f"{key.partition('.')[0]}.name"
        if key in READERS and values[chooser] not in READERS[key]:
            yield key, chooser


def check_read(recipe: Recipe, said: Iterable[str]) -> None:
    """Refuse keys that the user said and nothing reads; what a file says may be for other words on top of it.

    Raises:
        RecipeError: with what to type instead.
    """
    values = flatten(recipe.to_dict())
    for key, chooser in unread(values, (key for key in said if values.get(key))):
        raise RecipeError(
            f"{key}={typed(values[key])} does nothing with {chooser}={values[chooser]}: leave it out, "
            f"or type {chooser}={' or '.join(READERS[key])}"
        )

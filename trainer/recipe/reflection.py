"""The keys of the schema: their defaults, their sections, and the kinds of values they take.

And which keys have no effect together with others, and which a continued run may change.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from trainer.errors import RecipeError
from trainer.recipe.schema import Recipe, key_fields
from trainer.recipe.text import flatten, typed


def _readers() -> dict[str, tuple[str, ...]]:
    fields, found = dict(key_fields()), {}
    for key, field in fields.items():
        chooser, names = fields.get(f"{key.partition('.')[0]}.name"), (field.description or "").partition(":")[0]
        if chooser is not None and {*names.split(", ")} <= {*get_args(chooser.annotation)}:
            found[key] = tuple(names.split(", "))
    return found


# Keys that some optimizers or schedules read, by their `name`: those with which the key's comment begins.
READERS = _readers()
# What a continued run may change: where it runs, what it writes and how patient it is, never what a step computes.
FREE_ON_RESUME = {
    "mode", "devices", "threads", "timeout", "save", "logging", "resume", "output", "pipeline", "fsdp", "predict",
    "graphs", "recompute", "shares", "stop", "grace", "accumulate", "data.root", "data.workers", "data.check",
    "data.download",
    "data.cache_dir",
}  # fmt: skip


@functools.cache
def defaults() -> dict[str, Any]:
    """All keys of a recipe, dotted, with their defaults."""
    return flatten(Recipe().to_dict())


@functools.cache
def kinds() -> dict[str, tuple[Any, ...]]:
    """What each key takes: int, float, bool, str, list, type(None) and Literals; list[str] stands beside its list."""
    return {key: tuple(_parts(field.annotation)) for key, field in key_fields()}


@functools.cache
def choices() -> dict[str, tuple[str, ...]]:
    """The values that can be typed for a key, where there is a list of them."""
    listed = {}
    for key, taken in kinds().items():
        values = [str(value) for kind in taken if get_origin(kind) is Literal for value in get_args(kind)]
        values += ["true", "false"] * (bool in taken)
        if values:
            listed[key] = (*values, *["null"] * (type(None) in taken))
    return listed


def _parts(kind: Any) -> Iterator[Any]:
    """What an annotation is made of, without its limits."""
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _parts(get_args(kind)[0])
    elif origin in (Union, UnionType):
        for part in get_args(kind):
            yield from _parts(part)
    elif origin is list:
        yield list
        yield from [list[str]] * ([*_parts(get_args(kind)[0])] == [str])
    else:
        yield kind


def unread(values: Mapping[str, Any], keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Those of the keys that nothing reads, each with the key whose value decides. `values`: of all keys."""
    for key in keys:
        chooser = f"{key.partition('.')[0]}.name"
        if key in READERS and values[chooser] not in READERS[key]:
            yield key, chooser


def check_read(recipe: Recipe, keys: Iterable[str]) -> None:
    """Refuse keys that the user typed and nothing reads; those of a file may be for other words on top of it."""
    values, keys = flatten(recipe.to_dict()), [*keys]
    if "schedule.restart" in keys and (late := [at for at in recipe.schedule.restarts if at >= recipe.epochs]):
        raise RecipeError(f"schedule.restart=[{late[0]:g}] is never reached with epochs={recipe.epochs}: leave it out")
    for key, chooser in unread(values, (key for key in keys if values.get(key))):
        raise RecipeError(
            f"{key}={typed(values[key])} does nothing with {chooser}={values[chooser]}: leave it out, "
            f"or type {chooser}={' or '.join(READERS[key])}"
        )


def differing(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two recipes differ, with their (old, new) values."""
    before, now = flatten(old.to_dict()), flatten(new.to_dict())
    return {key: (before[key], value) for key, value in now.items() if before[key] != value}


def trains_longer(old: Recipe, new: Recipe) -> bool:
    """Whether `new` ends after more epochs or more steps, and after fewer of neither."""
    limits = [(old.epochs, new.epochs), (old.max_steps or math.inf, new.max_steps or math.inf)]
    return all(now >= was for was, now in limits) and any(now > was for was, now in limits)


def new_cosine(old: Recipe, new: Recipe) -> str | None:
    """What has to begin for `new` to train longer than `old`, in words; None where the rate simply goes on."""
    if old.schedule.name != "cosine" or (old.max_steps is None and old.epochs <= old.schedule.warmup_epochs):
        return None
    limit = f"{old.epochs} epochs" + (f" or {old.max_steps} steps" if old.max_steps else "")
    added = "what is" if old.max_steps or new.max_steps else f"the {new.epochs - old.epochs} epochs that are"
    return f"a new cosine from lr {old.peak_lr:g} over {added} added, once its {limit} are done"


def changed_keys(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Those of the differing keys that a continued run may not change."""
    free = set(FREE_ON_RESUME)
    if None not in (old.distill.teacher, new.distill.teacher):  # the weights are compared, wherever they are
        free |= {"distill.teacher"}
    if old.data.cache_format is not None:  # the pixels are those of that cache, wherever they are kept
        free |= {"data.cache"}
    if old.data.image_column is None:  # earlier versions looked for the columns: those that are typed are compared
        free |= {"data.image_column"} | ({"data.label_column"} if old.data.label_column is None else set())
    return {key: pair for key, pair in differing(old, new).items() if not {key, key.partition(".")[0]} & free}

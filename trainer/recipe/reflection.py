"""Properties of keys: default, type, and whether a resumed run may change the value."""

import functools
import math
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from trainer.recipe.schema import Recipe, key_fields, readers
from trainer.recipe.text import flatten

# Keys and sections that may differ when a run is resumed. They determine where and in which parts a
# step is computed, when the run ends, what it writes and how long it waits.
FREE_ON_RESUME = {
    "accumulate",
    "data.cache_dir",
    "data.check",
    "data.download",
    "data.root",
    "data.workers",
    "devices",
    "evaluate",
    "fsdp",
    "grace",
    "graphs",
    "logging",
    "max_time",
    "mode",
    "output",
    "pipeline",
    "predict",
    "recompute",
    "resume",
    "save",
    "shares",
    "stop",
    # The best value so far is of one metric, which `RunHistory.restore` compares.
    "task.metric",
    "task.metrics",
    "threads",
    "timeout",
    "verify",
}
# Section whose keys may differ when a run is resumed, which the resumed run reports. They change
# what its steps compute.
REPORTED_ON_RESUME = "augment"


@functools.cache
def defaults() -> dict[str, Any]:
    """Return the default of every dotted key."""
    return flatten(Recipe().to_dict())


@functools.cache
def list_key_types() -> dict[str, tuple[Any, ...]]:
    """Return the types that each key accepts.

    The types are int, float, bool, str, list, type(None) and Literals. For a list of strings, the
    result contains both list and list[str].
    """
    return {key: tuple(_parts(field.annotation)) for key, field in key_fields()}


@functools.cache
def choices() -> dict[str, tuple[str, ...]]:
    """Return the values of each key whose possible values can be listed, as they are typed."""
    values_by_key = {}
    for key, types in list_key_types().items():
        values = list[str]()
        for kind in types:
            if get_origin(kind) is Literal:
                values += map(str, get_args(kind))
        if bool in types:
            values += ["true", "false"]
        if values and type(None) in types:
            values.append("null")
        if values:
            values_by_key[key] = tuple(values)
    return values_by_key


def _parts(kind: Any) -> Iterator[Any]:
    """Yield the types in an annotation, without its limits."""
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _parts(get_args(kind)[0])
    elif origin in (Union, UnionType):
        for part in get_args(kind):
            yield from _parts(part)
    elif origin is list:
        yield list
        if [*_parts(get_args(kind)[0])] == [str]:
            yield list[str]
    else:
        yield kind


def compare_recipes(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys in which two recipes differ, with their (old, new) values."""
    before = flatten(old.to_dict())
    now = flatten(new.to_dict())
    return {key: (before[key], value) for key, value in now.items() if before[key] != value}


def is_longer(old: Recipe, new: Recipe) -> bool:
    """Return whether `new` makes a run of `old` longer.

    The result is True if `new` has more `epochs` or a larger `max_steps`, and neither is smaller.
    """
    old_steps = old.max_steps or math.inf
    new_steps = new.max_steps or math.inf
    if new.epochs < old.epochs or new_steps < old_steps:
        return False
    return new.epochs > old.epochs or new_steps > old_steps


def describe_restart(old: Recipe, new: Recipe) -> str | None:
    """Describe the restart of the schedule for the steps that `new` adds to `old`.

    Return None if the schedule cannot restart, or has not finished its warm-up.
    """
    schedule = old.schedule
    is_warming_up = old.max_steps is None and old.epochs <= schedule.warmup_epochs
    if schedule.name not in readers("schedule.restart") or is_warming_up:
        return None
    limit = f"{old.epochs} epochs"
    if old.max_steps:
        limit += f" or {old.max_steps} steps"
    if old.max_steps or new.max_steps:
        added = "what is"
    else:
        added = f"the {new.epochs - old.epochs} epochs that are"
    return (
        f"a new {schedule.name} from lr {old.peak_lr:g} over {added} added, once its {limit} are "
        "done"
    )


def changed_keys(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the keys that differ and must not differ in a resumed run, with (old, new) values."""
    free = set(FREE_ON_RESUME)
    # Resuming compares the weights of the two teachers, so the path of the teacher may change.
    if None not in (old.distill.teacher, new.distill.teacher):
        free |= {"distill.teacher"}
    # If the format of the cache is set, images have the same pixels with and without the cache, so
    # the run may be resumed with or without it.
    if old.data.cache_format is not None:
        free |= {"data.cache"}
    # If the old recipe names no column, the new one may name it: earlier versions searched for the
    # columns, so the user may have to name the columns that were found.
    if old.data.image_column is None:
        free.add("data.image_column")
        if old.data.label_column is None:
            free.add("data.label_column")
    changes = compare_recipes(old, new)
    return {key: changes[key] for key in changes if free.isdisjoint((key, key.partition(".")[0]))}

"""The keys and sections that can be typed, and the values of those that have a list of them: read from the schema."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from trainer.recipe import Recipe, flatten
from trainer.recipe.other_names import OTHER_KEYS

# Words of commands that no recipe holds.
OWN = {
    "train": ("recipe", "nproc", "plugin"),
    "compare": ("recipe", "modes", "repeats", "sweep", "nproc", "plugin", "output", "resume", "steps"),
    "plan": ("recipe", "plugin", "nproc", "memory", "measured", "bandwidth"),
    "predict": ("checkpoint", "plugin"),
    "evaluate": ("checkpoint", "plugin"),
}
FOLDERS = ("recipe", "checkpoint", "data.root", "data.labels", "output", "model.init_from", "measured")  # hold paths


@functools.cache
def keys() -> dict[str, Any]:
    """All keys of a recipe, dotted, with their defaults."""
    return flatten(Recipe().to_dict())


def sections() -> tuple[str, ...]:
    """Names of the sections: model, data, ..."""
    return tuple(name for name, field in Recipe.model_fields.items() if _is_section(field.annotation))


@functools.cache
def choices() -> dict[str, tuple[str, ...]]:
    """The values that can be typed for a key, where there is a list of them."""
    return dict(_choices(Recipe, ""))


def our_name(name: str, own: Collection[str]) -> str:
    """What a key, a section or one of the words `own` is called here; empty where nobody calls anything like that."""
    if name in keys() or name in sections() or name in own:
        return name
    within = [key for key in keys() if key.endswith(f".{name.lower()}")]
    return OTHER_KEYS.get(name.lower()) or (within[0] if len(within) == 1 else "")


def is_name(name: str) -> bool:
    """Whether `name` is a key, a section or a word of ours, or what other programs call one."""
    return bool(our_name(name, {word for words in OWN.values() for word in words}))


def _choices(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        if _is_section(kind):
            yield from _choices(kind, f"{prefix}{name}.")
            continue
        parts = (kind, *get_args(kind))
        values = [str(value) for part in parts if get_origin(part) is Literal for value in get_args(part)]
        values += ["true", "false"] * (bool in parts)
        if values:
            yield prefix + name, (*values, *(["null"] if type(None) in parts else []))


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)

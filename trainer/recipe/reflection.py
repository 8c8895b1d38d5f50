"""What the schema of recipes has: its keys with their defaults, their sections, and the kinds of values they take."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from trainer.recipe.schema import Recipe
from trainer.recipe.text import flatten


@functools.cache
def defaults() -> dict[str, Any]:
    """All keys of a recipe, dotted, with their defaults."""
    return flatten(Recipe().to_dict())


def sections() -> tuple[str, ...]:
    """Names of the sections: model, data, ..."""
    return tuple(name for name, field in Recipe.model_fields.items() if _is_section(field.annotation))


@functools.cache
def kinds() -> dict[str, tuple[Any, ...]]:
    """What each key takes: int, float, bool, str, list, type(None) and Literals; list[str] stands beside its list."""
    return dict(_kinds(Recipe, ""))


def is_text(key: str) -> bool:
    """Whether a key takes any text."""
    return str in kinds().get(key, ())


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


def _is_section(kind: Any) -> bool:
    """Whether a field holds keys of its own."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _kinds(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        if _is_section(kind):
            yield from _kinds(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, tuple(_parts(kind))


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

"""Plain values held against the types that tell their keys."""

from __future__ import annotations

import types
from dataclasses import is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from trainer.commands.sweep.space import dimension
from trainer.errors import RecipeError


def odd(value: Any, kind: Any, place: str = "it") -> list[str]:
    """What of a value its type does not tell: other keys, in words, or another type."""
    if is_typeddict(kind) or is_dataclass(kind):
        written = {"whole": "global", "overrides": "try"}  # which are keywords
        hints = {written.get(key, key): hint for key, hint in get_type_hints(kind).items()}
        if not isinstance(value, dict) or value.keys() != hints.keys():
            keys = set(value) ^ set(hints) if isinstance(value, dict) else value
            return [f"{place}: {keys}"]
        return [line for key in hints for line in odd(value[key], hints[key], f"{place}[{key!r}]")]
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        tried = [odd(value, one, place) for one in inner if one is not types.NoneType or value is None]
        return min(tried, key=len, default=[f"{place}: {value!r}"])
    if origin in (list, dict) and type(value) is not origin:
        return [f"{place}: {value!r} is no {kind}"]
    if origin is list:
        return [line for n, one in enumerate(value) for line in odd(one, inner[0], f"{place}[{n}]")]
    if origin is dict:
        pairs = [(key, inner[0], key) for key in value] + [(one, inner[1], key) for key, one in value.items()]
        return [line for one, wanted, key in pairs for line in odd(one, wanted, f"{place}[{key!r}]")]
    if origin is Literal:
        return [] if value in inner else [f"{place}: {value!r} is none of {inner}"]
    if kind is Any or (kind is float and type(value) is int) or type(value) is (kind or types.NoneType):
        return []
    return [f"{place}: {value!r} is no {kind}"]


def is_swept(key: str, text: str) -> bool:
    """Whether `key=text` means several values to `sweep`, right or wrong, rather than one."""
    try:
        return dimension(key, text) is not None
    except RecipeError:
        return True

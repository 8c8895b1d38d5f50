"""Checks that tests of several packages share: values against their types, and messages of refused
recipes.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from trainer.errors import RecipeError


def odd(value: Any, kind: Any, place: str = "it") -> list[str]:
    """List the differences between a value and its type: unexpected keys, or another type."""
    if is_typeddict(kind) or is_dataclass(kind):
        # These field names are keywords of Python.
        written = {"whole": "global", "overrides": "try"}
        hints = {written.get(key, key): hint for key, hint in get_type_hints(kind).items()}
        if not isinstance(value, dict) or value.keys() != hints.keys():
            keys = set(value) ^ set(hints) if isinstance(value, dict) else value
            return [f"{place}: {keys}"]
        return [
            line
            for key in hints
            for line in odd(
                value[key],
                hints[key],
                f"{place}[{key!r}]",
            )
        ]
    origin = get_origin(kind)
    inner = get_args(kind)
    if origin in (Union, types.UnionType):
        tried = [
            odd(value, one, place) for one in inner if one is not types.NoneType or value is None
        ]
        return min(tried, key=len, default=[f"{place}: {value!r}"])
    if origin in (list, dict) and type(value) is not origin:
        return [f"{place}: {value!r} is no {kind}"]
    if origin is list:
        return [line for n, one in enumerate(value) for line in odd(one, inner[0], f"{place}[{n}]")]
    if origin is dict:
        pairs = [(key, inner[0], key) for key in value] + [
            (one, inner[1], key) for key, one in value.items()
        ]
        return [
            line for one, expected, key in pairs for line in odd(one, expected, f"{place}[{key!r}]")
        ]
    if origin is Literal:
        return [] if value in inner else [f"{place}: {value!r} is none of {inner}"]
    if (
        kind is Any
        or (kind is float and type(value) is int)
        or type(value) is (kind or types.NoneType)
    ):
        return []
    return [f"{place}: {value!r} is no {kind}"]


def refusal(
    call: Callable[..., Any],
    *given: Any,
    most: int = 500,
    **named: Any,
) -> str:
    """Return the message of the RecipeError that a call raises, or "" if it raises none.

    The message is one line of less than `most` characters.
    """
    try:
        call(*given, **named)
    except RecipeError as error:
        text = str(error)
        assert text and "\n" not in text and len(text) < most
        return text
    return ""

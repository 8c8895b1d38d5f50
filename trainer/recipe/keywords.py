"""Keywords of the Python API as a recipe has them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import RecipeError
from trainer.recipe.reflection import defaults


def nested(keys: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Keys of a program, dotted or with two underscores for a dot, as sections of values that YAML has."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *parents, last = re.split(r"\.|(?<=[a-z])__(?=[a-z])", str(key))
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise RecipeError(f"{prefix}{parent} is given twice, as a value and as the section of {prefix}{key}")
        inner = _plain(value, prefix + ".".join([*parents, last]))
        if last in node:
            if not (isinstance(inner, dict) and isinstance(node[last], dict)) or inner.keys() & node[last].keys():
                raise RecipeError(f"{prefix}{'.'.join([*parents, last])} is given twice: keep one")
            inner = {**node[last], **inner}
        node[last] = inner
    return tree


def _plain(value: Any, key: str) -> Any:
    """A program's value as YAML has it: a path is text, a tuple a list, NumPy's and torch's numbers are numbers."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # NumPy's are subclasses
    if isinstance(value, Mapping):
        return nested(value, f"{key}.")
    if isinstance(value, list | tuple):
        return [_plain(inner, key) for inner in value]
    if isinstance(value, Path):
        return str(value)
    home, name = type(value).__module__, getattr(value, "__name__", type(value).__name__)
    if (home, type(value).__name__) == ("torch", "device"):
        return str(value)
    if home in ("numpy", "torch") and not getattr(value, "shape", 1):
        return value.item()
    known = defaults()
    section: str | None = next((inner for inner in known if inner.startswith(f"{key}.")), None)
    if section is None and key not in known:
        raise RecipeError(f"{key}={name} is not a key: what is no recipe's is model=net, data=(train, val), on_epoch=f")
    instead = f"set {section}= and the like, or {key}={{...}}" if section else "write numbers, text and lists"
    raise RecipeError(f"{key}={name} is not a value for a recipe: {instead}")

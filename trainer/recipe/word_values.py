"""What the value of a typed word is: text as it stands, letter by letter, and everything else as YAML has it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from pydantic import BaseModel

from trainer.recipe.recipe_files import check_shape
from trainer.recipe.schema import Recipe
from trainer.recipe.text import shown, typed


@functools.cache
def kinds() -> dict[str, tuple[Any, ...]]:
    """What each key takes: int, float, bool, str, list, type(None) and Literals; list[str] stands beside its list."""
    return dict(_kinds(Recipe, ""))


def is_text(key: str) -> bool:
    """Whether a key takes any text."""
    return str in kinds().get(key, ())


def word_value(key: str, text: str) -> Any:
    """The value that `key=text` sets. A path is taken as it is, with its quotes, blanks and signs.

    Raises:
        RecipeError: it would grow without limit.
        yaml.YAMLError, OmegaConfBaseException: it is no YAML, for keys that take other values than text.
    """
    taken = kinds().get(key, ())
    if text == "null" and type(None) in taken:
        return None
    number = int in taken and re.fullmatch(r"-?\d+", text)
    listed = list[str] in taken and text.startswith("[")
    if str in taken and not listed and not number and not (bool in taken and text in ("true", "false")):
        return text
    check_shape(text, f"{key}={shown(text)}")
    if listed:
        return yaml.load(text, yaml.BaseLoader)  # names that look like numbers stay names
    tree: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    return tree["value"]


def word_of(key: str, value: Any) -> str:
    """The word that sets a key to a value, as `word_value` reads it again."""
    return f"{key}={value if is_text(key) and isinstance(value, str) else typed(value)}"


def is_section(kind: Any) -> bool:
    """Whether a field holds keys of its own."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _kinds(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        if is_section(kind):
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

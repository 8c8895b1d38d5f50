"""What the value of a typed word is: text as it stands, letter by letter, and everything else as YAML has it."""

from __future__ import annotations

import re
from typing import Any

import yaml
from omegaconf import OmegaConf

from trainer.recipe.recipe_files import check_shape
from trainer.recipe.reflection import is_text, kinds
from trainer.recipe.text import shown, typed


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

"""Words of a command line: split into a command's own and its recipe's, their values, and corrected spelling."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import yaml
from omegaconf import OmegaConf

from trainer.errors import RecipeError
from trainer.recipe.recipe_files import check_shape
from trainer.recipe.reflection import is_text, kinds
from trainer.recipe.text import nearest, shown, typed


def split_words(words: Sequence[str], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """The values of the words `names=value`, by name, and all other words as they are.

    Raises:
        RecipeError: one of the former is given twice, or empty.
    """
    values: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in names:
            rest.append(word)
        elif not value and key not in values:
            raise RecipeError(f"{key}= is empty: write a value or leave it out")
        elif values.setdefault(key, value) != value:
            raise RecipeError(f"{key} is given twice, as '{key}={values[key]}' and as '{word}': keep one")
    return values, rest


def misspelt(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` is with a slip or two, or whose longer half it shares; None where it is only alike.

    `nearest` alone finds predict for rect and pe for nope.
    """
    guess = nearest(word, choices)
    if guess is None:
        return None
    choice, written = guess.lower(), word.lower()
    if "." not in written:
        choice = choice.rpartition(".")[2]
    alike = difflib.SequenceMatcher(None, written, choice).ratio()
    begin = next((n for n in range(len(written)) if written[: n + 1] != choice[: n + 1]), len(written))
    return guess if alike >= 0.8 or (begin and alike >= 0.74) or (begin >= 4 and alike >= 0.6) else None


def word_value(key: str, text: str) -> Any:
    """The value that `key=text` sets. A path is taken as it is, with quotes and spaces.

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

"""What `sweep` tries of a key: `optimizer.lr=[0.01,0.1]`, a list of values, or `optimizer.lr=0.001..1`, a range.

The schema tells a list of values from a list that is one value: `data.mean=[0.5]` is one, as everywhere, and
`data.mean=[[0.5],[0.4]]` are two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from trainer.errors import RecipeError
from trainer.recipe.recipe_files import word_value
from trainer.recipe.reflection import kinds
from trainer.recipe.text import shown

NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
FACTOR = 10  # a range whose ends differ by so much is sampled on a logarithmic scale


@dataclass(frozen=True)
class Choices:
    """Values of a key, as they are typed for one run."""

    key: str
    values: tuple[str, ...]

    def ends(self) -> tuple[str, ...]:
        return self.values

    def __str__(self) -> str:
        return f"{self.key}={' or '.join(self.values)}"


@dataclass(frozen=True)
class Range:
    """All numbers of a key from `low` to `high`, both included; whole ones where the key takes no others."""

    key: str
    low: float
    high: float
    whole: bool

    @property
    def log(self) -> bool:
        """Whether every factor counts alike, rather than every difference."""
        return self.low > 0 and self.high >= FACTOR * self.low

    def typed(self, value: float) -> str:
        """A number of the range as one types it, with four figures."""
        return str(round(value)) if self.whole else f"{min(max(float(f'{value:.4g}'), self.low), self.high):.12g}"

    def ends(self) -> tuple[str, ...]:
        return self.typed(self.low), self.typed(self.high)

    def __str__(self) -> str:
        return f"{self.key} from {self.typed(self.low)} to {self.typed(self.high)}" + " on a log scale" * self.log


Dimension = Choices | Range


def is_swept(key: str, text: str) -> bool:
    """Whether `key=text` means several values, right or wrong, rather than one."""
    try:
        return dimension(key, text) is not None
    except RecipeError:
        return True


def dimension(key: str, text: str) -> Dimension | None:
    """The values that `key=text` means; None where it is one value, or no key of a recipe.

    Raises:
        RecipeError: a list or a range that means nothing, with what to type.
    """
    taken = kinds().get(key, ())
    if text.startswith("["):
        return _choices(key, text, list in taken) if taken else None
    if {int, float} & {*taken} and str not in taken and ".." in text:
        return _range(key, text, whole=float not in taken)
    return None


def _choices(key: str, text: str, lists: bool) -> Choices | None:
    try:
        values = yaml.load(text, yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError):
        values = None
    if not isinstance(values, list):
        raise RecipeError(f"{key}={shown(text)} is not a list: write {key}=[first,second], in quotes for the shell")
    if lists and not any(isinstance(value, list) for value in values):
        return None
    words = [_word(key, value) for value in values]
    if not words:
        raise RecipeError(f"{key}=[] has no value to try")
    _check_distinct(key, words)
    return Choices(key, tuple(words))


def _word(key: str, value: Any) -> str:
    """A value as it is typed for one run."""
    if isinstance(value, list) and not any(isinstance(inner, list | dict) for inner in value):
        return f"[{','.join(map(str, value))}]"
    if not isinstance(value, str) or not value:
        raise RecipeError(f"{key}: {shown(value) or 'an empty value'} in a list to try is not a value of this key")
    return value


def _check_distinct(key: str, words: Iterable[str]) -> None:
    seen: dict[str, str] = {}
    for word in words:
        value = repr(word_value(key, word))
        if value in seen:
            same = word if seen[value] == word else f"{seen[value]} and {word}, which are the same"
            raise RecipeError(f"{key} lists {same}{' twice' * (seen[value] == word)}: keep one")
        seen[value] = word


def _range(key: str, text: str, whole: bool) -> Range:
    match = re.fullmatch(rf"({NUMBER})\.\.({NUMBER})", text.lower())
    low, high = (float(match[1]), float(match[2])) if match else (math.nan, math.nan)
    example = f"{key}={'16..256' if whole else '0.001..0.1'}"
    if not -math.inf < low < high < math.inf:
        raise RecipeError(f"{key}={shown(text)} is not a range: write two numbers, the smaller first, as in {example}")
    if whole and not (low.is_integer() and high.is_integer()):
        raise RecipeError(f"{key}={shown(text)}: {key} is a whole number: write two of them, as in {example}")
    return Range(key, low, high, whole)

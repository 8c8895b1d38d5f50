"""The words of a command line, sorted: those that say how a command runs, and those that belong to its recipe.

And which word of ours a misspelt one is.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence

from trainer.errors import RecipeError
from trainer.recipe.text import nearest


def split_words(words: Sequence[str], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """The values of the words `names=value`, by name, and all other words as they are.

    Raises:
        RecipeError: one of the former is given twice, or empty.
    """
    own: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in names:
            rest.append(word)
        elif own.get(key) == value and value:
            continue  # the same again
        elif key in own:
            raise RecipeError(f"{key} is given twice, as '{key}={own[key]}' and as '{word}': keep one")
        elif not value:
            raise RecipeError(f"{key}= is empty: write a value or leave it out")
        else:
            own[key] = value
    return own, rest


def misspelt(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` is with a slip or two, or whose longer half it shares; None where it is only alike.

    `nearest` alone finds predict for rect and pe for nope.
    """
    found = nearest(word, choices)
    if found is None:
        return None
    ours, typed = found.lower(), word.lower()
    if "." not in typed:
        ours = ours.rpartition(".")[2]
    alike = difflib.SequenceMatcher(None, typed, ours).ratio()
    begin = next((place for place in range(len(typed)) if typed[: place + 1] != ours[: place + 1]), len(typed))
    return found if alike >= 0.8 or (begin and alike >= 0.74) or (begin >= 4 and alike >= 0.6) else None

"""The words of a command line, sorted: those that say how a command runs, and those that belong to its recipe."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trainer.errors import RecipeError


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
        elif key in own:
            raise RecipeError(f"{key} is given twice, as '{key}={own[key]}' and as '{word}': keep one")
        elif not value:
            raise RecipeError(f"{key}= is empty: write a value or leave it out")
        else:
            own[key] = value
    return own, rest

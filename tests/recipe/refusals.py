"""What is told of a recipe that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer.errors import RecipeError


def refusal(call: Callable[..., Any], *given: Any, most: int = 500, **named: Any) -> str:
    """The one line of the RecipeError that a call raises, shorter than so many letters; empty where it raises none."""
    try:
        call(*given, **named)
    except RecipeError as error:
        text = str(error)
        assert text and "\n" not in text and len(text) < most
        return text
    return ""

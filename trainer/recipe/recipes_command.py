"""`python -m trainer recipes ...`: what it prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.errors import RecipeError
from trainer.recipe.editor import schema_text
from trainer.recipe.key_reference import shown_keys
from trainer.recipe.recipe_files import describe, shipped_recipes
from trainer.recipe.recipe_pages import PROGRAM, commented, differences, write_new
from trainer.recipe.schema import EXTENDS
from trainer.recipe.text import nearest

VERBS = ("diff", "new", "keys", "schema")


def answer(words: Sequence[str], program: str = PROGRAM) -> str:
    """What `recipes` followed by these words prints; `program` is how it was started.

    Raises:
        RecipeError: the words are none of `recipes --help`.
        SetupError: a file cannot be written.
    """
    verb, rest = (words[0], words[1:]) if words else ("list", [])
    if verb in ("list", "ls") and not rest:
        return listed() + "\n"
    if verb in ("show", "print", "cat") and rest:
        verb, rest = rest[0], rest[1:]
    if verb == "diff":
        names = [word.removeprefix("recipe=") for word in rest]
        if len(names) != 2:
            raise RecipeError(f"recipes diff compares two recipes, not {len(names)}: type recipes diff digits mnist")
        return differences(*names)
    if verb == "new":
        names = [word for word in rest if "=" not in word]
        if not names:
            raise RecipeError("recipes new needs a file to write: type recipes new my.yaml extends=digits")
        if len(names) > 1 and any(word.startswith(f"{EXTENDS}=") for word in rest):
            raise RecipeError(f"recipes new {names[0]}: '{names[1]}' is not key=value, as in optimizer.lr=0.05")
        if len(names) > 1:
            raise RecipeError(f"recipes new {names[0]}: to start from {names[1]}, type extends={names[1]}")
        return write_new(names[0], [word for word in rest if "=" in word], program)
    if verb == "keys":
        if len(rest) > 1:
            raise RecipeError(f"recipes keys takes one section or key, not {len(rest)}: type recipes keys {rest[0]}")
        return shown_keys(*rest)
    if verb == "schema":
        if rest:
            raise RecipeError(f"recipes schema takes no words, as {rest[0]}: type recipes schema > recipe.schema.json")
        return schema_text()
    guess = nearest(verb, VERBS)
    if guess and verb not in shipped_recipes() and not Path(verb).exists():
        raise RecipeError(f"recipes {verb}: no such recipe; did you mean recipes {guess}?")
    return commented(verb.removeprefix("recipe="), *rest)


def listed(indent: str = "") -> str:
    """The shipped recipes with a line each."""
    shipped = shipped_recipes()
    width = max(map(len, shipped), default=0)
    return "\n".join(f"{indent}{name:{width}}  {describe(path)}" for name, path in shipped.items())

"""`python -m trainer recipes ...`: the shipped recipes, one with comments and origins, the keys, the schema."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.errors import RecipeError
from trainer.recipe.key_reference import keys, schema_text, sections, shown_keys
from trainer.recipe.loading import load, origins
from trainer.recipe.recipe_files import shipped_recipes
from trainer.recipe.reflection import differing
from trainer.recipe.schema import Recipe
from trainer.recipe.text import flatten, nearest, typed

COLUMN = 34  # where comments start, unless a value reaches it
VERBS = ("keys", "schema")


def command(words: Sequence[str]) -> str:
    """What `recipes` followed by these words prints. Raises RecipeError: they are none of `recipes --help`."""
    if not words:
        return listed() + "\n"
    verb, rest = words[0], words[1:]
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
    lines = {name: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for name, path in shipped.items()}
    return "\n".join(f"{indent}{name:{width}}  {line}" for name, line in lines.items())


def commented(name: str, *words: str) -> str:
    """A recipe with every key as YAML that `load` accepts, each with its comment and who set it."""
    recipe, sources = load(name, *words), origins(name, *words)
    known, comments, changed = keys(), sections(), differing(Recipe(), recipe)
    lines = [f"# {recipe.name} with every key; `<- x` says that x set it, the rest is the default"]
    section = ""
    for key, value in flatten(recipe.to_dict()).items():
        parent, _, last = key.rpartition(".")
        if parent and parent != section:
            lines.append(_line(f"{parent}:", comments[parent]))
        section = parent
        arrow = f"  <- {sources[key]}" if key in sources and key in changed else ""
        lines.append(_line(f"{'  ' if parent else ''}{last}: {typed(value)}", known[key].comment + arrow))
    return "\n".join(lines) + "\n"


def _line(text: str, comment: str) -> str:
    return f"{text:{COLUMN}}  # {comment}" if comment else text

"""`python -m trainer recipes ...`: recipes with comments and origins, two compared, a file to start from, the keys."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

from trainer.errors import RecipeError, SetupError
from trainer.recipe.key_reference import MODELINE, keys, schema_file, schema_text, sections, shown_keys
from trainer.recipe.loading import YOURS, load, origins
from trainer.recipe.recipe_files import describe, find, shipped_recipes, split_words
from trainer.recipe.schema import EXTENDS
from trainer.recipe.text import flatten, nearest, typed

PROGRAM = "python -m trainer"  # how it is started, where nobody says otherwise
COLUMN = 34  # where comments start, unless a value reaches it
OFTEN = ("data.root", "model.name", "batch_size", "epochs", "optimizer.lr", "precision")  # what people change first
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
        if len(names) > 1:
            raise RecipeError(f"recipes new {names[0]}: '{names[1]}' is not key=value, as in extends=digits")
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


def commented(name: str, *words: str) -> str:
    """A recipe with every key as YAML that `load` accepts, each with its comment and who set it."""
    recipe, sources = load(name, *words), origins(name, *words)
    known, comments = keys(), sections()
    lines = [f"# {recipe.name} with every key; `<- x` says that x set it, the rest is the default"]
    section = ""
    for key, value in flatten(recipe.to_dict()).items():
        parent, _, last = key.rpartition(".")
        if parent and parent != section:
            lines.append(_line(f"{parent}:", comments[parent]))
        section = parent
        arrow = f"  <- {sources[key]}" if key in sources and typed(value) != known[key].default else ""
        lines.append(_line(f"{'  ' if parent else ''}{last}: {typed(value)}", known[key].comment + arrow))
    return "\n".join(lines) + "\n"


def differences(first: str, second: str) -> str:
    """The keys in which two recipes differ, with both values."""
    values, others = (flatten(load(name).to_dict()) for name in (first, second))
    rows = [(key, typed(values[key]), typed(others[key])) for key in others if values[key] != others[key]]
    if not rows:
        return f"{first} and {second} say the same\n"
    rows = [("", first, second), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def write_new(name: str, words: Sequence[str], program: str = PROGRAM) -> str:
    """Write a short recipe file that extends another and holds the keys of `words`; returns what to do with it.

    `program` is what the file and the answer show in front of words.

    Raises:
        RecipeError: the file exists or has no YAML name, nothing to extend is named, or a word is wrong.
        SetupError: the file cannot be written.
    """
    options, rest = split_words(words, (EXTENDS, "recipe"))
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        example = f"{path.name or 'my'}.yaml"
        raise RecipeError(f"recipes new {name}: a recipe is a .yaml file: type recipes new {example} extends=digits")
    if len(options) != 1:
        raise RecipeError(f"recipes new {name} needs one recipe to start from: type recipes new {name} extends=digits")
    (parent,) = options.values()
    text = _new_file(path, parent, rest, program)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RecipeError(f"{name} exists already and was not changed: choose another name, or remove it") from None
    except OSError as error:
        raise SetupError(f"{name} cannot be written: {error.strerror}") from None
    return f"wrote {name}; edit it, and type: {program} {shlex.quote(f'recipe={name}')}\n"


def _new_file(path: Path, parent: str, words: Sequence[str], program: str) -> str:
    """The text of a file that extends `parent`: the keys of `words`, and some that people change, as comments."""
    values, was = flatten(load(parent, *words).to_dict()), flatten(load(parent).to_dict())
    chosen = [key for key, origin in origins(parent, *words).items() if origin == YOURS]
    lines = [
        shorten(f"# {path.stem}: {parent} with {' '.join(words) or 'nothing changed yet'}", 110),
        f"{MODELINE}{schema_file()}",
        f"#   {program} {shlex.quote(f'recipe={path.name}')}      trains it",
        f"#   {program} recipes {shlex.quote(path.name)}     shows every key, what it means and who set it",
        f"{EXTENDS}: {typed(_from(path, parent))}",
    ]
    known = keys()
    section = ""
    for key in (key for key in values if key in chosen or key in OFTEN):
        parent_section, _, last = key.rpartition(".")
        active = any(other.rpartition(".")[0] == parent_section for other in chosen) if parent_section else True
        if parent_section and parent_section != section:
            lines.append(f"{'' if active else '# '}{parent_section}:")
        section = parent_section
        off, indent = ("" if key in chosen else "# "), ("  " if parent_section else "")
        front = f"{indent}{off}" if active else f"{off}{indent}"
        before = f"; {parent} has {typed(was[key])}" if values[key] != was[key] else ""
        lines.append(_line(f"{front}{last}: {typed(values[key])}", known[key].comment + before))
    return "\n".join(lines) + "\n"


def _from(path: Path, parent: str) -> str:
    """What a file at `path` calls `parent`: a shipped name, or the way from its own folder."""
    if parent in shipped_recipes():
        return parent
    file = find(parent)
    target = file.parent if file.name == "recipe.yaml" else file
    return os.path.relpath(target.resolve(), path.absolute().parent.resolve())


def _line(text: str, comment: str) -> str:
    return f"{text:{COLUMN}}  # {comment}" if comment else text

"""Recipes as people read and write them: with comments and origins, two compared, and a file to start from."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

from trainer.errors import RecipeError, SetupError
from trainer.recipe.editor import MODELINE, schema_file
from trainer.recipe.key_reference import keys, sections
from trainer.recipe.loading import YOURS, load, origins
from trainer.recipe.recipe_files import find, shipped_recipes
from trainer.recipe.recipe_words import split_words
from trainer.recipe.schema import EXTENDS
from trainer.recipe.text import flatten, typed

PROGRAM = "python -m trainer"  # how it is started, where nobody says otherwise
COLUMN = 34  # where comments start, unless a value reaches it
OFTEN = ("data.root", "model.name", "batch_size", "epochs", "optimizer.lr", "precision")  # what people change first


def commented(name: str, *words: str) -> str:
    """A recipe with every key as YAML that `load` accepts, each with its comment and who set it."""
    recipe, said = load(name, *words), origins(name, *words)
    known, comments = keys(), sections()
    lines = [f"# {recipe.name} with every key; `<- x` says that x set it, all else is as by default"]
    section = ""
    for key, value in flatten(recipe.to_dict()).items():
        parent, _, last = key.rpartition(".")
        if parent and parent != section:
            lines.append(_line(f"{parent}:", comments[parent]))
        section = parent
        arrow = f"  <- {said[key]}" if key in said and typed(value) != known[key].default else ""
        lines.append(_line(f"{'  ' if parent else ''}{last}: {typed(value)}", known[key].comment + arrow))
    return "\n".join(lines) + "\n"


def differences(one: str, other: str) -> str:
    """The keys in which two recipes differ, with both values."""
    first, second = load(one), load(other)
    was, now = flatten(first.to_dict()), flatten(second.to_dict())
    rows = [(key, typed(was[key]), typed(now[key])) for key in now if was[key] != now[key]]
    if not rows:
        return f"{one} and {other} say the same\n"
    rows = [("", one, other), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def write_new(name: str, words: Sequence[str], program: str = PROGRAM) -> str:
    """Write a short recipe file that extends another and holds the keys of `words`; returns what to do with it.

    `program` is what the file and the answer tell to type in front of words.

    Raises:
        RecipeError: the file exists or has no YAML name, nothing to extend is named, or a word is wrong.
        SetupError: the file cannot be written.
    """
    own, rest = split_words(words, (EXTENDS, "recipe"))
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        example = f"{path.name or 'my'}.yaml"
        raise RecipeError(f"recipes new {name}: a recipe is a .yaml file: type recipes new {example} extends=digits")
    if len(own) != 1:
        raise RecipeError(f"recipes new {name} needs one recipe to start from: type recipes new {name} extends=digits")
    (parent,) = own.values()
    text = _new_file(path, parent, rest, program)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RecipeError(f"{name} is there already and stays as it is: choose another name, or remove it") from None
    except OSError as error:
        raise SetupError(f"{name} cannot be written: {error.strerror}") from None
    return f"wrote {name}; edit it, and type: {program} {shlex.quote(f'recipe={name}')}\n"


def _new_file(path: Path, parent: str, words: Sequence[str], program: str) -> str:
    """The text of a file that extends `parent`: the keys of `words`, and some that people change, as comments."""
    values, was = flatten(load(parent, *words).to_dict()), flatten(load(parent).to_dict())
    said = [key for key, origin in origins(parent, *words).items() if origin == YOURS]
    lines = [
        shorten(f"# {path.stem}: {parent} with {' '.join(words) or 'nothing changed yet'}", 110),
        f"{MODELINE}{schema_file()}",
        f"#   {program} {shlex.quote(f'recipe={path.name}')}      trains it",
        f"#   {program} recipes {shlex.quote(path.name)}     shows every key, what it means and who set it",
        f"{EXTENDS}: {typed(_from(path, parent))}",
    ]
    known = keys()
    section = ""
    for key in (key for key in values if key in said or key in OFTEN):
        parent_section, _, last = key.rpartition(".")
        active = any(other.rpartition(".")[0] == parent_section for other in said) if parent_section else True
        if parent_section and parent_section != section:
            lines.append(f"{'' if active else '# '}{parent_section}:")
        section = parent_section
        off, indent = ("" if key in said else "# "), ("  " if parent_section else "")
        front = f"{indent}{off}" if active else f"{off}{indent}"
        before = f"; {parent} has {typed(was[key])}" if values[key] != was[key] else ""
        lines.append(_line(f"{front}{last}: {typed(values[key])}", known[key].comment + before))
    return "\n".join(lines) + "\n"


def _from(path: Path, parent: str) -> str:
    """What a file at `path` calls `parent`: a shipped name, or the way from its own folder."""
    if parent in shipped_recipes():
        return parent
    found = find(parent)
    target = found.parent if found.name == "recipe.yaml" else found
    return os.path.relpath(target.resolve(), path.absolute().parent.resolve())


def _line(text: str, comment: str) -> str:
    return f"{text:{COLUMN}}  # {comment}" if comment else text

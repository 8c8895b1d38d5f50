"""Recipes from files and words: defaults < YAML < `key=value`, checked completely before anything heavy is imported.

`load` returns a frozen `Recipe` or raises a `RecipeError` whose line names the key and the nearest thing that works.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import OmegaConfBaseException

from trainer.errors import RecipeError
from trainer.recipe.keywords import as_keyword, nested
from trainer.recipe.recipe_files import (
    ENDINGS,
    find,
    key_lines,
    label_of,
    parent_of,
    read,
    shipped_recipes,
    text_of,
    word_of,
    word_value,
)
from trainer.recipe.reflection import check_read, defaults, unread
from trainer.recipe.schema import EXTENDS, NAMELESS, Recipe, validated
from trainer.recipe.slips import first_slip
from trainer.recipe.text import flatten, not_utf8, one_line, shown

YOURS = "your words"  # the origin of keys on the command line


Source = str | Path | Mapping[str, Any] | Recipe | None


def load(recipe: Source = None, *words: str, **keywords: Any) -> Recipe:
    """Merge defaults < what a file extends < a shipped recipe or YAML file < words < keywords.

    Args:
        recipe: a shipped name ("digits"), a path to a YAML file or run folder, a mapping, a recipe, or None for the
            defaults.
        words: `key=value` with dotted keys: "optimizer.lr=0.05", "devices=[cuda:0,cuda:1]". Values are YAML, but those
            of keys that take text are that text, whatever is in it: "output=runs/try #2".
        keywords: keys with Python values: `epochs=1`, `optimizer__lr=0.05`, `optimizer={"lr": 0.05}`,
            `**{"optimizer.lr": 0.05}`.

    Raises:
        RecipeError: naming the key, what was found, and the nearest thing that works.
    """
    try:
        return _loaded(recipe, words, keywords)
    except RecipeError:
        for path in _user_files(recipe) if _unusable(recipe) else ():
            if path.suffix.lower() not in ENDINGS:
                continue  # the message quotes its line, and `extends` may name any file of this machine
            if (slip := first_slip(text_of(path), shipped_recipes())) is not None:
                raise RecipeError(f"{path}: {slip}") from None
        raise


def _loaded(recipe: Source, words: Iterable[str], keywords: Mapping[str, Any]) -> Recipe:
    """As `load`, but for the line of a file in its message."""
    name, layers = _layers(recipe, words, keywords)
    plain: Mapping[str, Any] = {}
    for _, tree in layers:
        plain = _merged(plain, tree)
    labels = _origins(layers)
    sources = {key: name if label == YOURS else label for key, label in labels.items()}
    try:
        try:
            loaded = validated(plain, name, sources)
        except RecipeError:
            loaded = validated(plain, name, {**sources, **_places(recipe, name, labels)})  # again, with the line
        check_read(loaded, (key for key, label in labels.items() if label == YOURS))
        return loaded
    except RecipeError as error:
        raise RecipeError(as_keyword(str(error), keywords)) from None


def _unusable(recipe: Any) -> bool:
    """Whether a recipe is wrong by itself, without what is typed with it."""
    try:
        _loaded(recipe, (), {})
    except RecipeError:
        return True
    return False


def origins(recipe: Source = None, *words: str) -> dict[str, str]:
    """Where each key of `load(recipe, *words)` that is no default comes from: dotted key -> recipe, file or YOURS."""
    return _origins(_layers(recipe, words, {})[1])


def _layers(recipe: Source, words: Iterable[str], keywords: Mapping[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    """The recipe's name, and the trees to merge, each with its source's name: the last wins."""
    name, chain = NAMELESS, list[tuple[str, Any]]()
    if isinstance(recipe, str | Path):
        path = find(str(recipe))
        name = path.parent.name if path.name == "recipe.yaml" else path.stem
        chain = _extended(label_of(path), read(path), path.resolve())
        if fault := not_utf8(name):
            raise RecipeError(f"recipe={recipe}: {fault}")
        chain[-1] = (name, chain[-1][1])
    elif isinstance(recipe, Recipe):
        name, recipe = recipe._name, recipe.to_dict()
    elif recipe is not None and not isinstance(recipe, Mapping):
        raise RecipeError(f"a recipe is a name, a YAML file or a dictionary, not {type(recipe).__name__}")
    try:
        if isinstance(recipe, Mapping):
            chain = _extended(name, nested(recipe), None)
        typed_words, given = _words(words), nested(keywords)
    except RecursionError as error:
        raise RecipeError(f"{name}: {one_line(error)}") from None
    twice = flatten(typed_words).keys() & flatten(given).keys()
    if twice:
        raise RecipeError(f"{min(twice)} is given twice, as a word and as a keyword: keep one")
    typed = _merged(typed_words, given)
    if EXTENDS in typed:
        parent = shown(typed[EXTENDS])
        raise RecipeError(f"extends={parent} is a line of a YAML file; on the command line it is recipe={parent}")
    return name, [*chain, (YOURS, typed)]


def _user_files(recipe: Source) -> Iterator[Path]:
    """The files of a recipe that are not shipped: its own, then what that extends, as far as they can be read."""
    if not isinstance(recipe, str | Path):
        return
    with suppress(RecipeError):
        path, seen = find(str(recipe)), set[Path]()
        while path.resolve() not in seen and label_of(path) not in shipped_recipes():
            yield path
            seen.add(path.resolve())
            tree = read(path)
            if not isinstance(parent := tree.get(EXTENDS), str):
                return
            path = parent_of(parent, label_of(path), path.resolve())


def _places(recipe: Any, name: str, sources: Mapping[str, str]) -> dict[str, str]:
    """The file and line of each key that a file of the user's sets last."""
    places: dict[str, str] = {}
    for order, path in enumerate(_user_files(recipe)):
        label, lines = label_of(path) if order else name, key_lines(path)
        places |= {key: f"{path}, line {lines[key]}" for key in sources if sources[key] == label and key in lines}
    return places


def _merged(below: Mapping[Any, Any], above: Mapping[Any, Any], prefix: str = "") -> dict[Any, Any]:
    """Two trees as one: sections are joined, and of other values the upper one counts.

    Where one has a section and the other a value, the wrong one stays, to be refused.
    """
    tree = dict(below)
    for name, value in above.items():
        under, key = tree.get(name), f"{prefix}{name}"
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            tree[name] = _merged(under, value, f"{key}.")
        elif under is None or isinstance(value, Mapping) == isinstance(under, Mapping):
            tree[name] = value
        else:
            is_key = key in defaults()
            tree[name] = value if isinstance(value, Mapping) == is_key else under
    return tree


def _origins(layers: Iterable[tuple[str, Any]]) -> dict[str, str]:
    sources: dict[str, str] = {}
    for label, tree in layers:
        sources |= dict.fromkeys(flatten(tree), label)
    return sources


def _extended(label: str, tree: Any, path: Path | None) -> list[tuple[str, Any]]:
    """A tree, from the file `path`, after the trees of all that it extends, farthest first, each with its name.

    Raises:
        RecipeError: a parent is not there, or extends its own child.
    """
    chain, seen = [(label, tree)], [path]
    while EXTENDS in tree:
        parent = tree.pop(EXTENDS)
        if not isinstance(parent, str) or not parent:
            raise RecipeError(f"{label}: extends: {shown(parent)} must be one recipe's name or file, as in digits")
        path = parent_of(parent, label, path)
        if path in seen:
            circle = " -> ".join([*(Path(name).name for name, _ in reversed(chain)), parent])
            raise RecipeError(f"{label}: extends forms a circle: {circle}")
        label, tree = label_of(path), read(path)
        chain.insert(0, (label, tree))
        seen.append(path)
    return chain


def words_of(recipe: Recipe) -> list[str]:
    """What to type for a recipe: its name where it is a shipped one, and every key that differs and matters."""
    shipped = recipe.name in shipped_recipes()
    before, now = flatten((load(recipe.name) if shipped else Recipe()).to_dict()), flatten(recipe.to_dict())
    without = dict(unread(now, now))
    changed = [word_of(key, value) for key, value in now.items() if value != before[key] and key not in without]
    return [f"recipe={recipe.name}", *changed] if shipped else changed or [f"mode={recipe.mode}"]


def _words(words: Iterable[str]) -> dict[Any, Any]:
    seen: dict[str, str] = {}
    for word in words:
        if not isinstance(word, str):
            raise RecipeError(f"each word is a separate text, as in 'epochs=2', not {type(word).__name__}")
        key, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
            raise RecipeError(f"'{word}' is not key=value, as in optimizer.lr=0.05")
        if key in seen:
            shell = key == "data.root" and word.endswith((".tar", ".parquet"))
            keep = "your shell expanded {...} into them; quote it: data.root='...'" if shell else "keep one"
            raise RecipeError(f"{key} is given twice, as '{seen[key]}' and as '{word}': {keep}")
        if not value:
            raise RecipeError(f"{key}= is empty: write a value, or leave it out")
        seen[key] = word
    merged: dict[Any, Any] = {}
    for key, word in seen.items():
        try:
            tree = word_value(key, word.partition("=")[2])
        except RecipeError:
            raise
        except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
            raise RecipeError(f"'{shown(word)}': {one_line(error)}") from None
        for name in reversed(key.split(".")):
            tree = {name: tree}
        merged = _merged(merged, tree)
    return merged

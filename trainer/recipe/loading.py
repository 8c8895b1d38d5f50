"""Recipes from files and words: defaults < YAML < `key=value`, checked completely before anything heavy is imported.

`load` returns a frozen `Recipe` or raises a `RecipeError` whose line names the key and the nearest thing that works.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf.errors import OmegaConfBaseException

from trainer.errors import RecipeError
from trainer.recipe.recipe_files import find, label_of, read, shipped_recipes, stored, word_of, word_value
from trainer.recipe.reflection import check_read, defaults, differing, unread
from trainer.recipe.removed import refuse_removed, without_removed
from trainer.recipe.schema import EXTENDS, NAMELESS, Recipe, validated
from trainer.recipe.text import flatten, not_utf8, one_line, shown

YOURS = "your words"  # the origin of keys on the command line

Source = str | Path | Mapping[str, Any] | Recipe | None


class Layer(NamedTuple):
    """Keys to merge, and what messages call their source."""

    label: str
    tree: Any


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
    name, layers = _layers(recipe, words, keywords)
    plain: Mapping[str, Any] = {}
    for layer in layers:
        plain = _merged(plain, layer.tree)
    labels = _origins(layers)
    sources = {key: name if label == YOURS else label for key, label in labels.items()}
    loaded = validated(plain, name, sources)
    check_read(loaded, (key for key, label in labels.items() if label == YOURS))
    return loaded


def origins(recipe: Source = None, *words: str) -> dict[str, str]:
    """Where each key of `load(recipe, *words)` that is no default comes from: dotted key -> recipe, file or YOURS."""
    return _origins(_layers(recipe, words, {})[1])


def load_stored(tree: Any, label: str) -> Recipe:
    """The recipe that a run has stored elsewhere than in a file of its own, which messages call `label`.

    Raises RecipeError, ValueError, TypeError.
    """
    return load(without_removed(stored(dict(tree)), label))


def _read(path: Path) -> dict[Any, Any]:
    return without_removed(read(path), str(path))


def _layers(recipe: Source, words: Iterable[str], keywords: Mapping[str, Any]) -> tuple[str, list[Layer]]:
    """The recipe's name, and the trees to merge, each with its source's name: the last wins."""
    name, chain = NAMELESS, list[Layer]()
    if isinstance(recipe, str | Path):
        path = find(str(recipe))
        name = path.parent.name if path.name == "recipe.yaml" else path.stem
        chain = _extended(label_of(path), _read(path), path.resolve())
        if fault := not_utf8(name):
            raise RecipeError(f"recipe={recipe}: {fault}")
        chain[-1] = Layer(name, chain[-1].tree)
    elif isinstance(recipe, Recipe):
        name, recipe = recipe._name, recipe.to_dict()
    elif recipe is not None and not isinstance(recipe, Mapping):
        raise RecipeError(f"a recipe is a name, a YAML file or a dictionary, not {type(recipe).__name__}")
    try:
        if isinstance(recipe, Mapping):
            refuse_removed(own := nested(recipe))
            chain = _extended(name, own, None)
        typed_words, given = _words(words), nested(keywords)
    except RecursionError as error:
        raise RecipeError(f"{name}: {one_line(error)}") from None
    twice = flatten(typed_words).keys() & flatten(given).keys()
    if twice:
        raise RecipeError(f"{min(twice)} is given twice, as a word and as a keyword: keep one")
    typed = _merged(typed_words, given)
    refuse_removed(typed)
    if EXTENDS in typed:
        parent = shown(typed[EXTENDS])
        raise RecipeError(f"extends={parent} is a line of a YAML file; on the command line it is recipe={parent}")
    return name, [*chain, Layer(YOURS, typed)]


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


def _origins(layers: Iterable[Layer]) -> dict[str, str]:
    sources: dict[str, str] = {}
    for layer in layers:
        sources |= dict.fromkeys(flatten(layer.tree), layer.label)
    return sources


def _extended(label: str, tree: Any, path: Path | None) -> list[Layer]:
    """A tree, from the file `path`, after the trees of all that it extends, farthest first, each with its name.

    Raises:
        RecipeError: a parent is not there, or extends its own child.
    """
    chain, seen = [Layer(label, tree)], [path]
    while EXTENDS in tree:
        parent = tree.pop(EXTENDS)
        if not isinstance(parent, str) or not parent:
            raise RecipeError(f"{label}: extends: {shown(parent)} must be one recipe's name or file, as in digits")
        path = find(parent, path.parent if path else Path(), f"{label}: extends: ").resolve()
        if path in seen:
            circle = " -> ".join([*(Path(layer.label).name for layer in reversed(chain)), parent])
            raise RecipeError(f"{label}: extends forms a circle: {circle}")
        label, tree = label_of(path), _read(path)
        chain.insert(0, Layer(label, tree))
        seen.append(path)
    return chain


def words_of(recipe: Recipe) -> list[str]:
    """What to type for a recipe: its name where it is a shipped one, and every key that differs and matters."""
    shipped = recipe.name in shipped_recipes()
    changed = differing(load(recipe.name) if shipped else Recipe(), recipe)
    without = dict(unread(flatten(recipe.to_dict()), changed))
    words = [word_of(key, value) for key, (_, value) in changed.items() if key not in without]
    return [f"recipe={recipe.name}", *words] if shipped else words or [f"mode={recipe.mode}"]


def _words(words: Iterable[str]) -> dict[Any, Any]:
    seen: dict[str, str] = {}
    for word in words:
        if not isinstance(word, str):
            raise RecipeError(f"each word is a separate text, as in 'epochs=2', not {type(word).__name__}")
        key, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
            raise RecipeError(f"'{word}' is not key=value, as in optimizer.lr=0.05")
        if key in seen:
            raise RecipeError(f"{key} is given twice, as '{seen[key]}' and as '{word}': keep one")
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


# --- keywords of the Python API ---------------------------------------------------------------------------------------


def nested(keys: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Keys of a program, dotted or with two underscores for a dot, as sections of values that YAML has."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *parents, last = re.split(r"\.|(?<=[a-z])__(?=[a-z])", str(key))
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise RecipeError(f"{prefix}{parent} is given twice, as a value and as the section of {prefix}{key}")
        inner = _plain(value, prefix + ".".join([*parents, last]))
        if last in node:
            if not (isinstance(inner, dict) and isinstance(node[last], dict)) or inner.keys() & node[last].keys():
                raise RecipeError(f"{prefix}{'.'.join([*parents, last])} is given twice: keep one")
            inner = {**node[last], **inner}
        node[last] = inner
    return tree


def _plain(value: Any, key: str) -> Any:
    """A program's value as YAML has it: a path is text, a tuple a list, NumPy's and torch's numbers are numbers."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # NumPy's are subclasses
    if isinstance(value, Mapping):
        return nested(value, f"{key}.")
    if isinstance(value, list | tuple):
        return [_plain(inner, key) for inner in value]
    if isinstance(value, Path):
        return str(value)
    home, name = type(value).__module__, getattr(value, "__name__", type(value).__name__)
    if (home, type(value).__name__) == ("torch", "device"):
        return str(value)
    if home in ("numpy", "torch") and not getattr(value, "shape", 1):
        return value.item()
    known = defaults()
    section: str | None = next((inner for inner in known if inner.startswith(f"{key}.")), None)
    if section is None and key not in known:
        raise RecipeError(f"{key}={name} is not a key: what is no recipe's is model=net, data=(train, val), on_epoch=f")
    instead = f"set {section}= and the like, or {key}={{...}}" if section else "write numbers, text and lists"
    raise RecipeError(f"{key}={name} is not a value for a recipe: {instead}")

"""Load recipes from YAML files and arguments `key=value`.

Arguments override a file, and a file overrides the defaults. A recipe is checked completely
before anything heavy is imported. `load` returns a frozen `Recipe`, or raises a `RecipeError` that
names the key and the closest value that works.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf.errors import OmegaConfBaseException

from trainer.errors import RecipeError
from trainer.recipe.key_reference import keys
from trainer.recipe.recipe_files import (
    find_recipe,
    format_argument,
    format_recipe_path,
    parse_value,
    read_recipe_file,
    remove_passwords,
    shipped_recipes,
)
from trainer.recipe.reflection import compare_recipes, defaults
from trainer.recipe.removed import refuse_removed, replace_removed
from trainer.recipe.schema import EXTENDS, NAMELESS, Recipe, validated
from trainer.recipe.text import ARGUMENT_KEYS, flatten, format_value, not_utf8, one_line
from trainer.recipe.unused import describe_unused, find_idle, find_unread

# Origin of the keys that the user typed on the command line or passed as keywords.
YOURS = "your words"

Source = str | Path | Mapping[str, Any] | Recipe | None


class Layer(NamedTuple):
    """Keys from one source, which are merged with those of other sources.

    Attributes:
        label: name of the source in messages: a recipe, a file, or `YOURS`.
        tree: values by key, in nested sections.
    """

    label: str
    tree: Any


def load(recipe: Source = None, *words: str, **keywords: Any) -> Recipe:
    """Load a recipe: merge the values from all sources, and check the result.

    A value from a later source in this list replaces a value from an earlier one: the defaults, the
    recipes that the file extends, the file, `words`, `keywords`.

    Args:
        recipe: name of a shipped recipe ("digits"), path of a YAML file or run folder, a mapping, a
            recipe, or None for the defaults.
        words: arguments `key=value` with dotted keys: "optimizer.lr=0.05",
            "devices=[cuda:0,cuda:1]". A value is YAML, except that the value of a key that
            accepts strings is used unchanged: "output=runs/try #2".
        keywords: keys with Python values: `epochs=1`, `optimizer__lr=0.05`, `optimizer={"lr":
            0.05}`, `**{"optimizer.lr": 0.05}`.

    Raises:
        RecipeError: a key or value is invalid. The message names the key, its value, and the
            closest value that works.
    """
    name, layers = _layers(recipe, words, keywords)
    sources = _origins(layers)
    typed = tuple(key for key, label in sources.items() if label == YOURS)
    for key in typed:
        sources[key] = name
    loaded = validated(_joined(layers), name, sources)
    if isinstance(recipe, Recipe):
        typed += recipe.typed
    loaded._typed = typed
    return loaded


def notes_on_idle(recipe: Source = None, *words: str, **keywords: Any) -> list[str]:
    """Return a sentence for each key that has no effect although the user set it.

    Both typed keys and keys in the user's files are checked. A key in a file is not reported if the
    user typed the argument that makes the key ineffective, such as another mode.
    """
    layers = _layers(recipe, words, keywords)[1]
    sources = _origins(layers)
    values = flatten(load(recipe, *words, **keywords).to_dict())
    own_keys = [key for key, label in sources.items() if label not in shipped_recipes()]
    idle_keys = [*find_idle(values, own_keys)]
    # Validation sets model.weights to null if model.init_from is set. Report the value before that.
    weights = flatten(_joined(layers)).get("model.weights")
    if "model.weights" in own_keys and weights != values["model.weights"]:
        values["model.weights"] = weights
        idle_keys.append(("model.weights", "model.init_from", "model.init_from=null"))
    lines = []
    for key, chooser, remedy in idle_keys:
        if sources[key] == YOURS or sources.get(chooser) != YOURS:
            cause = format_argument(chooser, values[chooser])
            lines.append(describe_unused(format_argument(key, values[key]), cause, remedy))
    return lines


def origins(recipe: Source = None, *words: str) -> dict[str, str]:
    """Return the origin of each key of `load(recipe, *words)` that is not a default.

    The origin of a dotted key is a recipe, a file or YOURS.
    """
    return _origins(_layers(recipe, words, {})[1])


def load_stored(tree: Any, label: str) -> Recipe:
    """Load a recipe from the metadata of a checkpoint, or from another file of a run.

    Keys and values that newer versions have removed are replaced.

    Args:
        tree: the stored recipe.
        label: name of the file in messages.

    Raises:
        RecipeError, ValueError, TypeError: `tree` is not a recipe.
    """
    return load(replace_removed(remove_passwords(dict(tree)), label))


def _read(path: Path) -> dict[Any, Any]:
    return replace_removed(_expand_names(read_recipe_file(path)), str(path))


def _expand_names(tree: Mapping[Any, Any]) -> dict[Any, Any]:
    """Replace a string in the place of a section by the section's key `name`.

    `optimizer: adam` becomes `optimizer: {name: adam}`. Sections without such a key are kept.
    """
    expanded = dict(tree)
    for key, value in tree.items():
        if isinstance(value, str) and f"{key}.name" in defaults():
            expanded[key] = {"name": value}
    return expanded


def _layers(
    recipe: Source, words: Iterable[str], keywords: Mapping[str, Any]
) -> tuple[str, list[Layer]]:
    """Return (name, layers): the recipe's name, and the layers to merge, lowest first."""
    name = NAMELESS
    chain = []
    if isinstance(recipe, str | Path):
        path = find_recipe(str(recipe))
        # All runs have a file of this name, so a run is called by the name of its folder.
        if path.name == "recipe.yaml":
            name = path.parent.name
        else:
            name = path.stem
        chain = _extended(format_recipe_path(path), _read(path), path.resolve())
        if fault := not_utf8(name):
            raise RecipeError(f"recipe={recipe}: {fault}")
        chain[-1] = Layer(name, chain[-1].tree)
    elif isinstance(recipe, Recipe):
        name = recipe._name
        recipe = recipe.to_dict()
    elif recipe is not None and not isinstance(recipe, Mapping):
        raise RecipeError(
            f"a recipe is a name, a YAML file or a dictionary, not {type(recipe).__name__}"
        )
    try:
        if isinstance(recipe, Mapping):
            tree = _expand_names(nest_keywords(recipe))
            refuse_removed(tree)
            chain = _extended(name, tree, None)
        argument_tree = _words(words)
        keyword_tree = _expand_names(nest_keywords(keywords))
    except RecursionError as error:
        raise RecipeError(f"{name}: {one_line(error)}") from None
    repeated_keys = flatten(argument_tree).keys() & flatten(keyword_tree).keys()
    if repeated_keys:
        raise RecipeError(
            f"{min(repeated_keys)} is given twice, as a word and as a keyword: keep one"
        )
    typed = _merged(argument_tree, keyword_tree)
    refuse_removed(typed)
    if EXTENDS in typed:
        parent = format_value(typed[EXTENDS])
        raise RecipeError(
            f"extends={parent} is a line of a YAML file; on the command line it is recipe={parent}"
        )
    return name, [*chain, Layer(YOURS, typed)]


def _merged(below: Mapping[Any, Any], above: Mapping[Any, Any], prefix: str = "") -> dict[Any, Any]:
    """Merge two trees: sections are joined, and values of `above` replace those of `below`."""
    # Copy, because `below` may be a section of a layer, whose keys are still read afterwards.
    tree = dict(below)
    for name, value in above.items():
        under = tree.get(name)
        key = f"{prefix}{name}"
        is_section = isinstance(value, Mapping)
        was_section = isinstance(under, Mapping)
        # Arguments are a section that null replaces.
        is_free = under is None or key in ARGUMENT_KEYS
        if is_section and was_section:
            tree[name] = _merged(tree[name], value, f"{key}.")
        # If only one of the two is a section, the one with the wrong type is kept, so that the
        # check of the merged recipe reports it.
        elif is_free or is_section == was_section or is_section == (key in defaults()):
            tree[name] = value
    return tree


def _joined(layers: Iterable[Layer]) -> Mapping[str, Any]:
    tree: Mapping[str, Any] = {}
    for layer in layers:
        tree = _merged(tree, layer.tree)
    return tree


def _origins(layers: Iterable[Layer]) -> dict[str, str]:
    sources: dict[str, str] = {}
    for layer in layers:
        sources |= dict.fromkeys(flatten(layer.tree), layer.label)
    return sources


def _extended(label: str, tree: Any, path: Path | None) -> list[Layer]:
    """Return the layers of a tree and of the files that it extends, lowest first.

    Args:
        label: name of the tree in messages.
        tree: the keys. `EXTENDS` is removed.
        path: file of the tree; None if it is not from a file.

    Raises:
        RecipeError: a parent does not exist, or extends its own child.
    """
    chain = [Layer(label, tree)]
    seen = [path]
    while EXTENDS in tree:
        parent = tree.pop(EXTENDS)
        if not isinstance(parent, str) or not parent:
            raise RecipeError(
                f"{label}: extends: {format_value(parent)} must be one recipe's name or file, as "
                "in digits"
            )
        folder = Path()
        if path:
            folder = path.parent
        path = find_recipe(parent, folder, f"{label}: extends: ").resolve()
        if path in seen:
            names = [Path(layer.label).name for layer in reversed(chain)]
            circle = " -> ".join([*names, parent])
            raise RecipeError(f"{label}: extends forms a circle: {circle}")
        label = format_recipe_path(path)
        tree = _read(path)
        chain.insert(0, Layer(label, tree))
        seen.append(path)
    return chain


def load_base(recipe: Recipe) -> Recipe:
    """Return the shipped recipe with the name of `recipe`, or else the defaults."""
    if recipe.name in shipped_recipes():
        return load(recipe.name)
    return Recipe()


def format_arguments(recipe: Recipe) -> list[str]:
    """Return the arguments `key=value` that a user can type to get this recipe."""
    words = []
    if recipe.name in shipped_recipes():
        words.append(f"recipe={recipe.name}")
    changes = compare_recipes(load_base(recipe), recipe)
    unread_keys = dict(find_unread(flatten(recipe.to_dict()), changes))
    for key, (_, value) in changes.items():
        if key not in unread_keys:
            words.append(format_argument(key, value))
    return words or [f"mode={recipe.mode}"]


def find_own_values(recipe: Recipe) -> dict[str, Any]:
    """Return the keys that the user has set, with their values, for a comparison of runs.

    The result has the keys that were typed, and those whose value differs from `load_base`. The
    keys `output`, `resume` and `logging.*`, which do not change the training, are left out.
    """
    values = flatten(recipe.to_dict())
    changes = compare_recipes(load_base(recipe), recipe)
    own = {}
    for key, value in values.items():
        is_own = key in changes or key in recipe.typed
        if is_own and not key.startswith(("output", "resume", "logging.")):
            own[key] = value
    return own


def format_typed(recipe: Recipe) -> list[str]:
    """Return the typed keys among `find_own_values` as arguments `key=value`."""
    own = find_own_values(recipe)
    return [format_argument(key, own[key]) for key in own if key in recipe.typed]


def _words(words: Iterable[str]) -> dict[Any, Any]:
    """Parse arguments to a tree."""
    seen: dict[str, str] = {}
    merged: dict[Any, Any] = {}
    for word in words:
        if not isinstance(word, str):
            raise RecipeError(
                f"each word is a separate text, as in 'epochs=2', not {type(word).__name__}"
            )
        # Everything after the first "=" is the value, which may contain further "=" characters.
        key, _, value = word.partition("=")
        if not re.match(r"[A-Za-z_]\w*(\.\w+)*=", word):
            example = keys()[word].example if word in defaults() else "optimizer.lr=0.05"
            raise RecipeError(
                f"'{word}' is not key=value, as in {example}; put a value with spaces in quotes"
            )
        # `optimizer=adam` means `optimizer.name=adam`; `optimizer={lr: 0.1}` is the whole section.
        if f"{key}.name" in defaults() and not value.startswith("{") and value != "null":
            key += ".name"
        if key in seen:
            raise RecipeError(f"{key} is given twice, as '{seen[key]}' and as '{word}': keep one")
        if not value:
            raise RecipeError(f"{key}= is empty: write a value, or leave it out")
        seen[key] = word
        try:
            tree = parse_value(key, value)
        except RecipeError:
            raise
        except (
            yaml.YAMLError,
            OmegaConfBaseException,
            ValueError,
            TypeError,
            RecursionError,
        ) as error:
            raise RecipeError(f"'{format_value(word)}': {one_line(error)}") from None
        for name in reversed(key.split(".")):
            tree = {name: tree}
        merged = _merged(merged, tree)
    return merged


def nest_keywords(keys: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Convert keywords of the Python API to nested sections of YAML values.

    Args:
        keys: values by key. Keys are dotted, or have two underscores for a dot.
        prefix: section of the keys, with a dot at its end, for messages.

    Raises:
        RecipeError: a key is given twice, or a value has no equivalent in YAML.
    """
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        # Two underscores within a name stand for a dot, because keywords cannot contain dots.
        *parents, last = re.split(r"\.|(?<=[a-z])__(?=[a-z])", str(key))
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise RecipeError(
                    f"{prefix}{parent} is given twice, as a value and as the section of "
                    f"{prefix}{key}"
                )
        dotted = prefix + ".".join([*parents, last])
        inner = _plain(value, dotted)
        if last in node:
            # Two sections without a common key can be joined.
            are_sections = isinstance(inner, dict) and isinstance(node[last], dict)
            if not are_sections or inner.keys() & node[last].keys():
                raise RecipeError(f"{dotted} is given twice: keep one")
            inner = {**node[last], **inner}
        node[last] = inner
    return tree


def _plain(value: Any, key: str) -> Any:
    """Convert a Python value to a type of YAML, such as paths to strings and tuples to lists.

    Raises:
        RecipeError: the value has no equivalent in YAML.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            # The value may be of a subclass, such as `numpy.float64`, which YAML cannot represent.
            return kind(value)
    if isinstance(value, Mapping):
        return nest_keywords(value, f"{key}.")
    if isinstance(value, list | tuple):
        return [_plain(inner, key) for inner in value]
    if isinstance(value, Path):
        return str(value)
    module = type(value).__module__
    name = getattr(value, "__name__", type(value).__name__)
    # The types are compared by name, because importing torch or NumPy takes long.
    if (module, type(value).__name__) == ("torch", "device"):
        return str(value)
    if module in ("numpy", "torch") and not getattr(value, "shape", 1):
        return value.item()
    first_key = next((inner for inner in defaults() if inner.startswith(f"{key}.")), "")
    if not first_key and key not in defaults():
        raise RecipeError(
            f"{key}={name} is not a key: what is no recipe's is model=net, data=(train, val), "
            "on_epoch=f, on_step=f, on_evaluation=f"
        )
    instead = "write numbers, text and lists"
    if first_key:
        instead = f"set {first_key}= and the like, or {key}={{...}}"
    raise RecipeError(f"{key}={name} is not a value for a recipe: {instead}")

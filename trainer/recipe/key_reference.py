"""`python -m trainer recipes ...`: the shipped recipes, one with comments and origins, the keys, the schema.

The key reference: every key with its default, what it takes, and the one comment that the schema has of it. And the
JSON Schema of recipe files, beside the shipped recipes, whose second line names it for editors with the YAML language
server: VS Code with Red Hat's YAML extension, Neovim, Emacs, Helix.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import RecipeError
from trainer.recipe.explaining import advice_on
from trainer.recipe.known_names import DATASETS, SMALL_MODELS, TASKS
from trainer.recipe.loading import load, origins
from trainer.recipe.recipe_files import shipped_recipes
from trainer.recipe.reflection import READERS, choices, defaults, differing, unread
from trainer.recipe.schema import EXTENDS, EXTENDS_COMMENT, Recipe
from trainer.recipe.text import flatten, nearest, typed

USUAL_MODELS = ("resnet18", "resnet50", "vit_b_16", "convnext_tiny", "efficientnet_b0", "swin_t", "mobilenet_v3_large")
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


# --- the keys ---------------------------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """The schema of a recipe file, without references, as draft 7, which all editors read."""
    made = Recipe.model_json_schema()
    plain = _inlined({name: made[name] for name in ("type", "additionalProperties", "properties")}, made["$defs"])
    names = {"model": (*SMALL_MODELS, *USUAL_MODELS), "data": DATASETS, "task": TASKS}
    for section, known in names.items():
        plain["properties"][section]["properties"]["name"] |= _usually(known)
    extends = {"description": EXTENDS_COMMENT, **_usually(tuple(shipped_recipes()))}
    plain["properties"] = {EXTENDS: extends, **plain["properties"]}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "A recipe of trainer"}
    return {**head, "description": "What a run does. Missing keys come from `extends`, or have their default.", **plain}


def schema_text() -> str:
    """The text of the shipped file."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def _usually(names: tuple[str, ...]) -> dict[str, Any]:
    """Any text; an editor offers these."""
    return {"type": "string", "minLength": 1, "examples": [*names], "anyOf": [{"enum": [*names]}, {"type": "string"}]}


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """Without references, next to which old readers ignore all else, and without titles made of names."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
    named = {
        key: {name: _inlined(each, definitions) for name, each in value.items()}
        if key == "properties"
        else _inlined(value, definitions)
        for key, value in node.items()
        if key != "title"
    }
    return named


@dataclass(frozen=True)
class Key:
    """One key: its dotted name, its default as typed, its values where there is a list, its comment, an example."""

    name: str
    default: str
    values: str
    comment: str
    example: str

    @property
    def section(self) -> str:
        """Empty for the keys of the highest level."""
        return self.name.rpartition(".")[0]


def keys() -> dict[str, Key]:
    """Every key of a recipe by its dotted name, in the schema's order."""
    properties = json_schema()["properties"]
    reference = {}
    for name, node in _leaves(properties):
        default = "none" if name == EXTENDS else typed(defaults()[name])
        values = "" if _values(node) == [True, False] else ", ".join(choices().get(name, ()))
        reference[name] = Key(name, default, values, node.get("description", ""), _example(name, node))
    return reference


def sections() -> dict[str, str]:
    """Every section with its comment; the highest level is the empty name."""
    nodes = json_schema()["properties"]
    return {"": "The run.", **{name: node["description"] for name, node in nodes.items() if "properties" in node}}


def shown_keys(word: str | None = None) -> str:
    """The reference as lines for a terminal: all of it, a section, or the keys of that name."""
    chosen = [key for key in keys().values() if word is None or word in _names(key)]
    if not chosen:
        raise RecipeError(f"recipes keys {word}: no key; {advice_on(str(word).replace('-', '_'), keys())}")
    names, defaults = max(len(key.name) for key in chosen), max(len(key.default) for key in chosen)
    lines = []
    for section, comment in sections().items():
        rows = [key for key in chosen if key.section == section]
        lines += [f"{section or 'recipe'}: {comment}"] if rows else []
        lines += [
            f"  {key.name:{names}}  {key.default:{defaults}}  {key.comment} [{key.values or f'as in {key.example}'}]"
            for key in rows
        ]
    return "\n".join(lines) + "\n"


def _names(key: Key) -> tuple[str, ...]:
    return key.name, key.section, key.name.rpartition(".")[2]


def _leaves(properties: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, node in properties.items():
        if "properties" in node:
            yield from _leaves(node["properties"], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", node


def _example(name: str, node: Mapping[str, Any]) -> str:
    """A key with a value as typed: the schema's example, or another value than the default, or else that.

    Before it, what a run needs in order to read the key.
    """
    default = None if name == EXTENDS else defaults()[name]
    value = next((each for each in (*node.get("examples", ()), *_values(node)) if each != default), default)
    text = f"[{','.join(map(typed, value))}]" if isinstance(value, list) else typed(value)
    needed = [f"{chooser}={READERS[name][0]}" for _, chooser in unread(defaults(), [name])]
    return f"{name}: {text}" if name == EXTENDS else " ".join([*needed, f"{name}={text}"])


def _values(node: Mapping[str, Any]) -> list[Any]:
    """The values that a JSON Schema lists; none where it takes any number or text."""
    if "anyOf" in node:
        return [value for each in node["anyOf"] for value in _values(each)]
    if node.get("type") == "boolean":
        return [True, False]
    return [*node.get("enum", ()), *([node["const"]] if "const" in node else [])]

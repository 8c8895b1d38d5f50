"""The JSON Schema of recipe files, by which editors complete keys, show their comments and mark mistakes.

It is beside the shipped recipes, whose second line names it for editors with the YAML language server: VS Code with
Red Hat's YAML extension, Neovim, Emacs, Helix.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.recipe.known_names import DATASETS, SMALL_MODELS, TASKS
from trainer.recipe.recipe_files import shipped_folder, shipped_recipes
from trainer.recipe.schema import EXTENDS, EXTENDS_COMMENT, Recipe

FILE = "recipe.schema.json"
MODELINE = "# yaml-language-server: $schema="
USUAL_MODELS = ("resnet18", "resnet50", "vit_b_16", "convnext_tiny", "efficientnet_b0", "swin_t", "mobilenet_v3_large")


def schema_file() -> Path:
    """The file of the shipped schema."""
    return shipped_folder() / FILE


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
    return {**head, "description": "What a run is to do; what is left out is as in `extends`, or a default.", **plain}


def schema_text() -> str:
    """As the shipped file holds it."""
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

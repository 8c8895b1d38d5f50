"""The keys and sections that can be typed, and the values of those that have a list of them: read from the schema."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, Literal, get_args, get_origin

from trainer.recipe import Recipe, flatten
from trainer.recipe.other_names import OTHER_KEYS
from trainer.recipe.word_values import is_section, is_text, kinds

# Words of commands that no recipe holds.
OWN = {
    "train": ("recipe", "nproc", "plugin"),
    "compare": ("recipe", "modes", "repeats", "sweep", "nproc", "plugin", "output", "resume", "steps"),
    "plan": ("recipe", "plugin", "nproc", "memory", "measured", "bandwidth"),
    "predict": ("checkpoint", "plugin"),
    "evaluate": ("checkpoint", "plugin"),
}
EVERY_WORD = frozenset(word for words in OWN.values() for word in words)
WANTS: dict[str, tuple[str, ...]] = {
    "train": ("recipe=digits",),
    "plan": ("recipe=digits",),
    "compare": ("recipe=digits",),
    "predict": ("checkpoint=RUN", "data.root=FOLDER"),
    "evaluate": ("checkpoint=RUN",),
}  # what each needs at least
EXPORTS = ("onnx", "exported_program", "torchscript", "safetensors")  # what export's format= can be
FOLDERS = ("recipe", "checkpoint", "data.root", "data.labels", "output", "model.init_from", "measured")  # hold paths


@functools.cache
def keys() -> dict[str, Any]:
    """All keys of a recipe, dotted, with their defaults."""
    return flatten(Recipe().to_dict())


def sections() -> tuple[str, ...]:
    """Names of the sections: model, data, ..."""
    return tuple(name for name, field in Recipe.model_fields.items() if is_section(field.annotation))


@functools.cache
def choices() -> dict[str, tuple[str, ...]]:
    """The values that can be typed for a key, where there is a list of them."""
    found = {}
    for key, taken in kinds().items():
        values = [str(value) for kind in taken if get_origin(kind) is Literal for value in get_args(kind)]
        values += ["true", "false"] * (bool in taken)
        if values:
            found[key] = (*values, *["null"] * (type(None) in taken))
    return found


def our_name(name: str, own: Collection[str]) -> str:
    """What a key, a section or one of the words `own` is called here; empty where nobody calls anything like that."""
    if name in keys() or name in sections() or name in own:
        return name
    within = [key for key in keys() if key.endswith(f".{name.lower()}")]
    return OTHER_KEYS.get(name.lower()) or (within[0] if len(within) == 1 else "")


def is_path_or_text(name: str) -> bool:
    """Whether a word's value is taken as it stands: a path, or any text."""
    return name in FOLDERS or (is_text(name) and list not in kinds()[name])


def is_name(name: str) -> bool:
    """Whether `name` is a key, a section or a word of ours, or what other programs call one."""
    return bool(our_name(name, EVERY_WORD))

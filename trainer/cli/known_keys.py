"""The words that commands take besides the keys of a recipe, and what other programs call them."""

from __future__ import annotations

from collections.abc import Collection

from trainer.recipe.other_names import OTHER_KEYS
from trainer.recipe.reflection import defaults, is_text, kinds, sections

# Words of commands that no recipe holds.
COMMAND_WORDS = {
    "train": ("recipe", "nproc", "plugin"),
    "compare": ("recipe", "modes", "repeats", "sweep", "nproc", "plugin", "output", "resume", "steps"),
    "plan": ("recipe", "plugin", "nproc", "memory", "measured", "bandwidth"),
    "predict": ("checkpoint", "plugin"),
    "evaluate": ("checkpoint", "plugin"),
}
EVERY_WORD = frozenset(word for words in COMMAND_WORDS.values() for word in words)
WANTS: dict[str, tuple[str, ...]] = {
    "train": ("recipe=digits",),
    "plan": ("recipe=digits",),
    "compare": ("recipe=digits",),
    "predict": ("checkpoint=RUN", "data.root=FOLDER"),
    "evaluate": ("checkpoint=RUN",),
}  # what each needs at least
EXPORTS = ("onnx", "exported_program", "torchscript", "safetensors")  # what export's format= can be
FOLDERS = ("recipe", "checkpoint", "data.root", "data.labels", "output", "model.init_from", "measured")  # hold paths


def our_name(name: str, options: Collection[str]) -> str:
    """What a key, a section or one of a command's `options` is called here; empty where no program has such a name."""
    if name in defaults() or name in sections() or name in options:
        return name
    within = [key for key in defaults() if key.endswith(f".{name.lower()}")]
    return OTHER_KEYS.get(name.lower()) or (within[0] if len(within) == 1 else "")


def is_path_or_text(name: str) -> bool:
    """Whether a word's value is taken as it stands: a path, or any text."""
    return name in FOLDERS or (is_text(name) and list not in kinds()[name])


def is_name(name: str) -> bool:
    """Whether `name` is a key, a section or a word of ours, or what other programs call one."""
    return bool(our_name(name, EVERY_WORD))

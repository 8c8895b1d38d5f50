"""What a word of a command line is in our words, and the rest of that line."""

from __future__ import annotations

import glob
import os
import re
import shlex
from dataclasses import dataclass, field
from functools import cached_property

from trainer.errors import RecipeError
from trainer.recipe import TRAITS, Recipe, load
from trainer.recipe.known_names import WEIGHTS_FILES

SHARDS = (".tar", ".parquet")


@dataclass(frozen=True)
class Meaning:
    """The words to type instead, a note on them, and what was typed, where that is known."""

    words: tuple[str, ...]
    note: str = ""
    typed: str = ""

    def __str__(self) -> str:
        if not self.words:
            return f"'{self.typed[:80]}': {self.note}"
        return f"'{self.typed[:80]}' is {shlex.join(self.words)}" + f" ({self.note})" * bool(self.note)


@dataclass(frozen=True)
class CommandLine:
    """The command, words that are its own and no recipe's, the keys with their values, and all as it was typed."""

    command: str
    options: tuple[str, ...]
    values: dict[str, str] = field(default_factory=dict)
    typed: tuple[str, ...] = ()

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe that is asked for, without the other words; None where there is none of that name."""
        try:
            return load(self.values.get("recipe"))
        except RecipeError:
            return None

    @cached_property
    def images(self) -> tuple[str, ...]:
        """Images for predict, as a shell writes out photos/*.jpg, and folders of images."""
        there = os.path.exists if "checkpoint" in self.options else os.path.isdir
        others = (*WEIGHTS_FILES, *SHARDS, ".yaml", ".yml", ".py")
        paths = {word: os.path.expanduser(word.removeprefix("data.root=")) for word in self.typed}
        words = (word for word, path in paths.items() if there(path) and not path.endswith(others) and not is_run(path))
        return tuple(word for word in words if "checkpoint" in self.values or not holds_runs(paths[word]))

    @property
    def data_name(self) -> str:
        """The data set of the recipe that is asked for."""
        typed = self.values.get("data.name")
        return typed or (recipe.data.name if (recipe := self.recipe) else "")

    @property
    def staged(self) -> bool:
        """Whether the mode that is asked for cuts the model into stages."""
        mode = self.values.get("mode") or (self.recipe.mode if self.recipe else "")
        return mode in TRAITS and TRAITS[mode].staged


def put(key: str, value: str, note: str = "") -> Meaning:
    """One word of ours."""
    return Meaning((f"{key}={value}",), note)


def plain(value: str) -> str:
    """A value without capitals and signs, but for dots: "Data-Parallel" is dataparallel."""
    return re.sub(r"[^a-z0-9.]", "", value.lower())


def is_run(path: str) -> bool:
    """Whether a folder is a run's."""
    return os.path.isfile(os.path.join(path, "recipe.yaml"))


def holds_runs(folder: str) -> bool:
    """Whether a folder is one of runs, and none of them itself."""
    if not os.path.isdir(folder) or is_run(folder) or os.path.exists(os.path.join(folder, "checkpoints")):
        return False
    return any(glob.iglob(os.path.join(glob.escape(folder), "*", "recipe.yaml")))

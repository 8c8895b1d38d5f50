"""What a word says in our words, and what else was typed around it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

from trainer.errors import RecipeError
from trainer.recipe import TRAITS, Recipe, load

WEIGHTS = (".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".tar")
SHARDS = (".tar", ".parquet")
YES, NO = ("1", "y", "yes", "on", "t", "true"), ("0", "n", "no", "off", "f", "false")
NOTHING = (*NO, "none", "null", "nil")


@dataclass(frozen=True)
class Meaning:
    """Words of ours that say what was meant, and what else it could have meant."""

    words: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class Around:
    """What else was typed: the command, its own words, and the other keys."""

    command: str
    own: tuple[str, ...]
    values: dict[str, str] = field(default_factory=dict)

    @property
    def one_process(self) -> bool:
        """Whether the mode drives several devices from one process."""
        traits = TRAITS.get(self.values.get("mode", ""))
        return traits is not None and traits.processes == "one" and traits.many_devices

    @property
    def recipe(self) -> Recipe | None:
        """The recipe that is asked for, without the other words; None where there is none of that name."""
        try:
            return load(self.values.get("recipe"))
        except RecipeError:
            return None

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

    @property
    def epochs(self) -> int:
        """Those that are asked for; 0 where nobody knows."""
        typed = self.values.get("epochs", "")
        return int(typed) if typed.isdigit() else self.recipe.epochs if self.recipe and not typed else 0


@dataclass(frozen=True)
class Fix:
    """What was typed, what to type instead, and what else there is to say."""

    typed: str
    words: tuple[str, ...]
    note: str = ""

    def __str__(self) -> str:
        if not self.words:
            return f"'{self.typed[:80]}': {self.note}"
        return f"'{self.typed[:80]}' is {shlex.join(self.words)}" + f" ({self.note})" * bool(self.note)


def put(key: str, value: str, note: str = "") -> Meaning:
    """One word of ours."""
    return Meaning((f"{key}={value}",), note)


def plain(value: str) -> str:
    """A value without capitals and signs, but for dots: "Data-Parallel" is dataparallel."""
    return re.sub(r"[^a-z0-9.]", "", value.lower())

"""`python -m trainer completion bash|zsh`: a script that completes commands, keys and recipes at the Tab key.

They are lists in the script, so that no Python starts at a Tab; files and folders come from the shell itself. The
shells' code lies beside this file; both share `completion.sh`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.cli.command_table import COMMANDS
from trainer.cli.grammar import program
from trainer.cli.guide import topics
from trainer.errors import RecipeError
from trainer.recipe import shipped_recipes
from trainer.recipe.checks import refused_schedules
from trainer.recipe.known_names import DATASETS, SMALL_MODELS, TASKS, torchvision_classifiers
from trainer.recipe.reflection import choices, defaults

SHELLS = ("bash", "zsh")


def command(words: Sequence[str]) -> int:
    """Print the script for a shell."""
    if list(words) not in [[shell] for shell in SHELLS]:
        given = f"'{' '.join(words)[:40]}' is not a shell that completion knows:" if words else "for which shell?"
        raise RecipeError(f"{given} type {program()} completion bash, or zsh")
    print(script(words[0]), end="")
    return 0


def script(shell: str) -> str:
    """The script for bash or zsh, which completes what this version knows."""
    keys = [f"{key}=" for key in defaults()]
    words = {name: [f"{word}=" for word in command.words] for name, command in COMMANDS.items() if command.words}
    marks = {
        "COMMANDS": COMMANDS,
        "RECIPES": shipped_recipes(),
        "KEYS": keys,
        "VALUES": _values(),
        "TOPICS": topics(),
        "SHELLS": SHELLS,
        "OWN": [f"{name}) _trainer_match {' '.join(own)} $_trainer_keys ;;" for name, own in words.items()],
    }
    text = _code("sh").removesuffix("\n")
    for mark, found in marks.items():
        text = text.replace(f"@{mark}@", ("\n        " if mark == "OWN" else " ").join(found))
    return _code(shell).replace("@FOUND@", text).replace("@PROGRAM@", program())


def _code(shell: str) -> str:
    return Path(__file__).with_suffix(f".{shell}").read_text(encoding="utf-8")


def _values() -> list[str]:
    """key=value for what can be typed, where there is a list of it."""
    known = {key: [value for value in allowed if key != "pipeline.schedule" or value not in refused_schedules()]
             for key, allowed in choices().items()}  # fmt: skip
    models = [*SMALL_MODELS, *torchvision_classifiers()]
    known |= {"model.name": models, "data.name": [*DATASETS], "task.name": [*TASKS]}
    known |= {"recipe": [*shipped_recipes()]}
    return [f"{key}={value}" for key, allowed in known.items() for value in allowed]

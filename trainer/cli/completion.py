"""`python -m trainer completion bash|zsh`: a script that completes what can stand at the cursor, at the Tab key.

Commands, recipes, keys, values and topics are lists in the script, and runs are folders that the shell sees, so that no
Python starts at a Tab. The shells' code lies beside this file; both share `completion.sh`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.cli.grammar import program
from trainer.cli.guide import topics
from trainer.cli.known_keys import COMMAND_WORDS, COMMANDS, EXPORTS, FOLDERS
from trainer.errors import RecipeError
from trainer.recipe import shipped_recipes
from trainer.recipe.checks import refused_schedules
from trainer.recipe.known_names import DATASETS, SMALL_MODELS, TASKS, torchvision_classifiers
from trainer.recipe.reflection import choices, defaults, sections

SHELLS = ("bash", "zsh")
OTHER_FOLDERS = [key for key in FOLDERS if key not in ("recipe", "checkpoint", "model.init_from", "measured")]


def command(words: Sequence[str]) -> int:
    """Print the script for a shell."""
    if list(words) not in [[shell] for shell in SHELLS]:
        given = f"'{' '.join(words)[:40]}' is not a shell that completion knows:" if words else "for which shell?"
        raise RecipeError(f"{given} type {program()} completion bash, or zsh")
    print(script(words[0]), end="")
    return 0


def script(shell: str) -> str:
    """The script for bash or zsh, which completes what this version knows."""
    marks = {
        "COMMANDS": COMMANDS,
        "RECIPES": shipped_recipes(),
        "KEYS": [f"{key}=" for key in defaults()],
        "VALUES": [f"{key}={value}" for key, allowed in _values().items() for value in allowed],
        "SECTIONS": [*sections(), *defaults()],
        "TOPICS": topics(),
        "SHELLS": SHELLS,
    }
    text = _code("sh").removesuffix("\n").replace("@OWN@", "\n".join(_commands()))
    for mark, words in marks.items():
        text = text.replace(f"@{mark}@", " ".join(words))
    text = text.replace("@FOLDERS@", " | ".join(OTHER_FOLDERS))
    return _code(shell).replace("@FOUND@", text).replace("@PROGRAM@", program())


def _code(shell: str) -> str:
    return Path(__file__).with_suffix(f".{shell}").read_text(encoding="utf-8")


def _commands() -> list[str]:
    """The branches of those commands that take keys: words of their own, and the recipe's."""
    return [
        f'        {name}) _trainer_match "$word" {" ".join(f"{word}=" for word in words)} $_trainer_keys ;;'
        for name, words in COMMAND_WORDS.items()
    ]


def _values() -> Mapping[str, Sequence[str]]:
    """What can be typed for a key, where there is a list of it."""
    known = choices()
    refused = refused_schedules()
    return {
        **known,
        "pipeline.schedule": [name for name in known["pipeline.schedule"] if name not in refused],
        "model.name": [*SMALL_MODELS, *torchvision_classifiers()],
        "data.name": DATASETS,
        "task.name": TASKS,
        "measured": ("here",),
        "format": EXPORTS,
        "yes": ("true", "false"),
    }

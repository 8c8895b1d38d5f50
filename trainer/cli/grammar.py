"""The words of a command line -> a command and its words as key=value, or the one line that says what to type."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence

from trainer.cli import predict_words
from trainer.cli.command_table import COMMANDS, OWN_WORDS
from trainer.errors import RecipeError
from trainer.processes import family
from trainer.processes.rank import place
from trainer.recipe import shipped_recipes
from trainer.recipe.key_reference import keys
from trainer.recipe.other_names import advice_on
from trainer.recipe.reflection import defaults
from trainer.recipe.text import nearest

FLAGS = ("--json",)  # ours, which have no value


def program(environment: Mapping[str, str] = os.environ) -> str:
    """How this program was started: by torchrun, by launch.sh, or as a module."""
    if _under_torchrun(environment):
        return f"torchrun --nproc_per_node={place(environment).local_size} -m trainer"
    return environment.get("TRAINER_COMMAND") or "python -m trainer"


def _under_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether the user's own torchrun started this."""
    return place(environment).launched and family.PARENT not in environment


def read(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command that the words name, and the words that it takes: `--key value` and `--key=value` as key=value.

    Raises:
        RecipeError: with what to type.
    """
    words = [word.rstrip("\r") for word in words]  # of a script that Windows wrote
    if not words:
        if _under_torchrun(os.environ):
            raise _to_type("train")
        return "help", []
    if words[0] in ("--version", "-V"):
        return "version", []
    command, rest = words[0], words[1:]
    if command not in COMMANDS:
        if "=" not in command and not command.startswith("-"):
            guess = nearest(command, [*COMMANDS, *shipped_recipes()])
            hint = f"did you mean {guess if guess in COMMANDS else f'recipe={guess}'}? " if guess else ""
            raise RecipeError(f"'{command[:80]}' is not a command; {hint}there are: {', '.join(COMMANDS)}")
        command, rest = "train", words
    if rest == ["help"]:
        return "help", [command]
    if COMMANDS[command].wants and not rest:
        raise _to_type(command)
    taken = spelled(rest)
    if command == "predict":
        taken = predict_words.sorted_out(taken)
    return command, [word for place, word in enumerate(taken) if "=" not in word or word not in taken[:place]]


def spelled(words: Sequence[str]) -> list[str]:
    """The words with options as key=value: `--key value`, `--key=value`, and dashes within a key."""
    taken, rest = list[str](), list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        name = key.lstrip("-").replace("-", "_")
        if not name or word in FLAGS:
            taken.append(word)
        elif equals:
            ours = key.startswith("-") or name in defaults() or name in OWN_WORDS  # else it may be a file's name
            taken.append(f"{name}={value}" if ours else word)
        elif not word.startswith("-"):
            taken.append(word)
        elif rest and "=" not in rest[0] and not re.match(r"-(?!\d)|$", rest[0]):  # it can be a value
            taken.append(f"{name}={rest.pop(0)}")
        elif name in defaults() or name in OWN_WORDS:
            example = keys()[name].example if name in defaults() else f"{name}=VALUE"
            raise RecipeError(f"{word} has no value: type {example}")
        else:
            raise RecipeError(f"{word}: {name} is not a key; {advice_on(name, [*defaults(), *OWN_WORDS])}")
    return taken


def _to_type(command: str) -> RecipeError:
    """What to type where a command was typed alone."""
    shown = [] if command == "train" else [command]
    typed = shlex.join([*shlex.split(program()), *shown, *COMMANDS[command].wants])
    return RecipeError(f"{command} what? type {typed}")

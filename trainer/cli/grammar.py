"""The words of a command line -> a command and its words as key=value, or the one line that says what to type."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Mapping, Sequence

from trainer.cli.command_table import COMMANDS, OWN_WORDS
from trainer.errors import RecipeError
from trainer.processes import family
from trainer.processes.rank import place
from trainer.recipe import shipped_recipes
from trainer.recipe.explaining import advice_on
from trainer.recipe.key_reference import keys
from trainer.recipe.reflection import defaults
from trainer.recipe.text import nearest
from trainer.saving.run_names import HOME, is_run

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
        taken = sorted_out(taken)
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


def sorted_out(words: Sequence[str]) -> list[str]:
    """The words of `predict`: the run among them as `checkpoint=`, and paths that hold a "=" so that they are no key.

    Raises:
        RecipeError: a word means two things or nothing, or two are runs.
    """
    taken = [_sorted_out(word) for word in words]
    runs = list(dict.fromkeys(word.partition("=")[2] for word in taken if word.startswith("checkpoint=")))
    if len(runs) > 1:
        raise RecipeError(f"{runs[0]} and {runs[1]} are both runs: type one of them, as in predict {runs[0]} photo.jpg")
    return taken


def _sorted_out(word: str) -> str:
    key, equals, _ = word.partition("=")
    path = os.path.expanduser(word)
    there = os.path.lexists(path)
    ours = key in defaults() or key in COMMANDS["predict"].words
    if word.startswith("-") or (equals and (ours or (not there and os.sep not in key))):
        return word
    below = os.path.join(HOME, word)
    run_here, run_below = is_run(path), is_run(below)
    if run_below and there and not run_here:
        raise RecipeError(f"'{word}' is here, and {below} is a run: type ./{word} for the first, {below} for the run")
    if run_here or run_below:
        return f"checkpoint={word}"
    if not there:
        raise RecipeError(f"'{word[:80]}': no photo, folder or run of that name")
    run = next(glob.iglob(os.path.join(glob.escape(path), "*", "recipe.yaml")), None)
    if run is not None:
        raise RecipeError(f"'{word}' holds runs: type one of them, as in predict {os.path.dirname(run)} photo.jpg")
    return os.path.join(".", word) if "=" in word.split(os.sep)[0] else word


def _to_type(command: str) -> RecipeError:
    """What to type where a command was typed alone."""
    shown = [] if command == "train" else [command]
    typed = shlex.join([*shlex.split(program()), *shown, *COMMANDS[command].wants])
    return RecipeError(f"{command} what? type {typed}")

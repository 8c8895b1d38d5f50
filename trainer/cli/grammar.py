"""Parse a command line into a command and its arguments as key=value.

An error is one line that says what to type.
"""

import glob
import os
import re
import shlex
from collections.abc import Sequence

from trainer.cli.command_table import COMMANDS, OWN_WORDS
from trainer.errors import RecipeError
from trainer.processes import family
from trainer.processes.rank import read_place
from trainer.recipe import find_nearest, shipped_recipes
from trainer.recipe.explaining import suggest_key
from trainer.recipe.key_reference import keys
from trainer.recipe.reflection import defaults
from trainer.saving.run_names import HOME, is_choice, is_run

# Options without a value, which `normalize_options` does not rewrite.
FLAGS = ("--json",)
# Commands of Lightning, Ultralytics and others -> what to type here instead.
_COMMANDS_ELSEWHERE = {
    "fit": "train recipe=digits",
    "val": "evaluate RUN",
    "validate": "evaluate RUN",
    "eval": "evaluate RUN",
    "test": "evaluate RUN split=test",
    "infer": "predict RUN photo.jpg",
    "resume": "train recipe=RUN output=RUN resume=auto",
}


def format_program() -> str:
    """Return the command with which the user starts this program.

    The command is torchrun, launch.sh, the installed `trainer`, or Python with -m.
    """
    if _is_under_torchrun():
        rank = read_place()
        # Ranks on several machines connect to an address that torchrun is given. `--standalone`
        # would ignore this address, so it is shown only for a single machine.
        alone = ""
        if rank.size == rank.local_size:
            alone = " --standalone"
        return f"torchrun{alone} --nproc_per_node={rank.local_size} -m trainer"
    return os.environ.get("TRAINER_COMMAND") or "python -m trainer"


def _is_under_torchrun() -> bool:
    """Return whether the user started torchrun, rather than our launcher."""
    return read_place().launched and family.PARENT not in os.environ


def read(words: Sequence[str]) -> tuple[str, list[str]]:
    """Parse the arguments of the program.

    Returns:
        (command, arguments): the name of the command, and its arguments, where `--key value` and
        `--key=value` became `key=value`.

    Raises:
        RecipeError: the command or an option is unknown, a required argument or a value is missing,
            or an argument that is a run or a path is ambiguous or does not exist.
    """
    # Remove the CR that a shell passes at the end of each command of a script with Windows line
    # endings.
    words = [word.rstrip("\r") for word in words]
    if not words:
        if _is_under_torchrun():
            raise _build_missing_error("train")
        return "help", []
    if words[0] in ("--version", "-V"):
        return "version", []
    command = words[0]
    rest = words[1:]
    if command not in COMMANDS:
        if "=" not in command and not command.startswith("-"):
            guess = find_nearest(command, [*COMMANDS, *shipped_recipes()])
            hint = ""
            if instead := _COMMANDS_ELSEWHERE.get(command):
                hint = f"type {instead}; "
            elif guess:
                suggestion = guess if guess in COMMANDS else f"recipe={guess}"
                hint = f"did you mean {suggestion}? "
            raise RecipeError(
                f"'{command[:80]}' is not a command; {hint}there are: {', '.join(COMMANDS)}"
            )
        command = "train"
        rest = words
    # `plan help` prints the same page as `help plan`.
    if rest == ["help"]:
        return "help", [command]
    if COMMANDS[command].wants and not rest:
        raise _build_missing_error(command)
    # TensorBoard reads its options itself.
    if command == "tensorboard":
        return command, rest
    arguments = normalize_options(rest)
    if command in ("predict", "evaluate", "export"):
        arguments = join_run(command, arguments)
    # Drop an override that is repeated with the same value, because it is no conflict. Keep a
    # repeated photo.
    distinct = []
    for argument in arguments:
        if "=" not in argument or argument not in distinct:
            distinct.append(argument)
    return command, distinct


def normalize_options(words: Sequence[str]) -> list[str]:
    """Rewrite `--key value` and `--key=value` as `key=value`.

    Dashes in a key become underscores. All other arguments are kept.

    Raises:
        RecipeError: an option has no value, or its name is not a key.
    """
    arguments = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        name = key.lstrip("-").replace("-", "_")
        is_key = name in defaults() or name in OWN_WORDS
        if not name or word in FLAGS:
            arguments.append(word)
        elif equals:
            # The name of a file may contain "=" as well, and must not be changed.
            is_option = key.startswith("-") or is_key
            arguments.append(f"{name}={value}" if is_option else word)
        elif not word.startswith("-"):
            arguments.append(word)
        elif rest and "=" not in rest[0] and not re.match(r"-(?!\d)|$", rest[0]):
            # The next argument is the value. The pattern refuses an empty argument, and one that
            # starts with a dash, which is an option, unless it is a negative number.
            arguments.append(f"{name}={rest.pop(0)}")
        elif is_key:
            if name in defaults():
                example = keys()[name].example
            else:
                example = f"{name}=VALUE"
            raise RecipeError(f"{word} has no value: type {example}")
        else:
            raise RecipeError(
                f"{word}: {name} is not a key; {suggest_key(name, [*defaults(), *OWN_WORDS])}"
            )
    return arguments


def join_run(command: str, words: Sequence[str]) -> list[str]:
    """Join the arguments that name a run and its weights into `checkpoint=RUN` or `... RUN last`.

    A path for `predict` that contains "=" is rewritten so that it cannot be read as a key.

    Raises:
        RecipeError: an argument is ambiguous or does not exist, or two arguments are runs.
    """
    arguments = []
    runs: dict[str, None] = {}
    weights: dict[str, None] = {}
    position = 0
    for word in words:
        argument = _classify_path(word, command)
        key, _, value = argument.partition("=")
        if key != "checkpoint":
            arguments.append(argument)
        elif is_choice(value):
            weights[value] = None
        else:
            runs[value] = None
            position = len(arguments)
    for names, kind in ((runs, "runs"), (weights, "weights of a run")):
        if len(names) > 1:
            first, second = [*names][:2]
            raise RecipeError(f"{first} and {second} are both {kind}: type one of them")
    if runs or weights:
        arguments.insert(position, f"checkpoint={' '.join([*runs, *weights])}")
    return arguments


def _classify_path(word: str, command: str) -> str:
    key, equals, _ = word.partition("=")
    path = os.path.expanduser(word)
    exists = os.path.lexists(path)
    is_key = key in defaults() or key in COMMANDS[command].words
    if word.startswith("-"):
        return word
    # A misspelled key is returned too, for the parser of the recipe to report.
    if equals and (is_key or (not exists and os.sep not in key)):
        return word
    if command != "predict":
        return f"checkpoint={word}"
    if is_choice(word):
        if exists:
            raise RecipeError(
                f"'{word}' is here: type ./{word} to label it, or checkpoint={word} for the {word} "
                "weights of the run"
            )
        return f"checkpoint={word}"
    # The user may name a run by its path or by its name below the folder `runs`.
    below = os.path.join(HOME, word)
    run_here = is_run(path)
    run_below = is_run(below)
    if run_below and exists and not run_here:
        raise RecipeError(
            f"'{word}' is here, and {below} is a run: type ./{word} for the first, {below} for the "
            "run"
        )
    if run_here or run_below:
        return f"checkpoint={word}"
    if not exists:
        raise RecipeError(
            f"'{word[:80]}': no photo, folder or run of that name; type the path of one, as in "
            "predict photos"
        )
    run = next(glob.iglob(os.path.join(glob.escape(path), "*", "recipe.yaml")), None)
    if run is not None:
        raise RecipeError(
            f"'{word}' holds runs: type one of them, as in predict {os.path.dirname(run)} photo.jpg"
        )
    # The prefix "./" keeps the parser of the recipe from reading the path as a key.
    if "=" in word.split(os.sep)[0]:
        return os.path.join(".", word)
    return word


def _build_missing_error(command: str) -> RecipeError:
    """Build the error for a command that was typed without its required arguments."""
    arguments = shlex.split(format_program())
    if command != "train":
        arguments.append(command)
    arguments += COMMANDS[command].wants
    return RecipeError(f"{command} what? type {shlex.join(arguments)}")

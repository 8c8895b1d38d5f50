"""Entry point of `python -m trainer`: arguments -> command -> exit code."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # Python puts the working directory first in sys.path, where a user's random.py or yaml.py would
    # hide the library of the same name. So the directory becomes the last entry.
    sys.path.append(sys.path.pop(0))

from trainer.processes import early

if __name__ == "__main__" or early.is_installed_command():
    # Importing torch takes seconds, during which Ctrl-C must not print a traceback.
    early.install_handlers()

import logging
import multiprocessing
import os
import platform
import signal
import time
from collections.abc import Sequence
from importlib import import_module

from trainer.errors import RecipeError, SetupError, TrainerError, explain
from trainer.processes.terminal import (
    escape_control_characters,
    localize_commands,
    name_installed_command,
    outlive_terminal,
    say,
    show,
)

try:
    from trainer import recipe
    from trainer.cli import guide
    from trainer.cli.command_table import COMMANDS
    from trainer.cli.grammar import read
    from trainer.launch import endings, launching, topology
    from trainer.processes import family, interrupts, resources
    from trainer.processes.interrupts import exit_now, exit_python
    from trainer.processes.rank import read_place
    from trainer.recipe import parse_positive_integer, split_arguments
    from trainer.recipe.checks import check_names
    from trainer.saving.files import open_streams
    from trainer.saving.run_folder import asked_to_restart, open_check_folder
    from trainer.versions import VERSION, read_version
except ModuleNotFoundError as fault:
    # A required library is missing, for example after `pip install --no-deps`. The printed line
    # says what to install.
    message, exit_code = explain(fault)
    print(f"trainer: error: {localize_commands(message)}", file=sys.stderr)
    sys.exit(exit_code)

LAUNCH_OPTIONS = (*COMMANDS["train"].words, "checkpoint")
# These commands already print the program's name as the user typed it.
NAME_THE_PROGRAM = ("submit", "recipes", "guide")


def main() -> None:
    """Run the command that the arguments name, and exit with its code."""
    open_streams()
    outlive_terminal()
    # Set how long idle threads of OpenMP spin. This must come before the first import of torch,
    # because OpenMP reads its settings when torch is loaded.
    resources.spin_briefly()
    if early.is_installed_command():
        name_installed_command(sys.argv[0])
    code = answer(sys.argv[1:])
    # A rank in a forked process does not exit here, but returns to its caller `launching.run_rank`.
    if not code and multiprocessing.parent_process():
        return
    # Ignore Ctrl-C from now on: all output is written, and Ctrl-C while Python shuts down would
    # show a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _launched() or interrupts.skips_shutdown.is_set():
        logging.shutdown()
        exit_now(code)
    exit_python(code)


def answer(words: Sequence[str]) -> int:
    """Run a command, report its error if it fails, and return the exit code."""
    try:
        family.die_with_parent()
        check_folder()
        return run(words)
    except (Exception, KeyboardInterrupt) as error:
        now = time.time()
        line, code = explain(error)
        # Exit code 1 means a bug, so the stack is written to the run folder, or printed if there
        # is no run folder.
        if code == TrainerError.code:
            line = endings.with_stack(line, error)
        else:
            line = endings.name_stopped_ranks(line, code, error)
    endings.write_report(line, code, now)
    if family.launcher_prints() or (_launched() and not read_place().is_main):
        endings.let_others_print(code)
    else:
        endings.say(line, code)
    return code


def check_folder() -> None:
    """Raise SetupError if the working folder was deleted: torch and relative paths need it."""
    try:
        os.getcwd()
    except OSError:
        raise SetupError(
            "the working folder was deleted: change to an existing folder with cd and try again"
        ) from None


def run(words: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    if {"--help", "-h"} & set(words):
        return show_help([word for word in words if word not in ("--help", "-h")])
    command, rest = read(words)
    if COMMANDS[command].alone:
        topology.check_alone(command, os.environ, shared=command == "evaluate")
    if command == "train":
        return train(rest)
    if command == "evaluate":
        return evaluate(rest)
    if command == "version":
        show(
            f"trainer {VERSION}, torch {read_version('torch')}, Python "
            f"{platform.python_version()}\n"
        )
        return 0
    if command == "help":
        return show_help(rest)
    module = import_module(COMMANDS[command].home or f"trainer.commands.{command}")
    if command != "doctor":
        interrupts.raise_at_ctrl_c()
    result = module.command(rest)
    if isinstance(result, int):
        return result
    if command not in NAME_THE_PROGRAM:
        result = localize_commands(result)
    show(escape_control_characters(result))
    return 0


def show_help(words: Sequence[str]) -> int:
    """Print the help page of the first command in `words`; if none is a command, the overview."""
    for word in words:
        command = word.lstrip("-")
        if command in guide.parse_command_pages():
            show(guide.format_command_page(command))
            return 0
    # Imported here, because a training run does not need this module.
    from trainer.commands import recipes

    show(guide.format_overview(recipes.listed("  ")))
    return 0


def train(words: Sequence[str]) -> int:
    """Train in this process, or start ranks with torch's launcher."""
    options, rest = split_arguments(words, LAUNCH_OPTIONS)
    if "checkpoint" in options:
        raise RecipeError(
            "checkpoint= belongs to evaluate; to continue a run type output=runs/x resume=auto"
        )
    chosen = recipe.load(options.get("recipe"), *rest)
    if "plugin" not in options:
        check_names(chosen)
    restarts = parse_positive_integer("max_restarts", options.get("max_restarts")) or 0
    launch = launching.launch_to_start(chosen, options.get("nproc"), restarts)
    if "check" not in options and not _launched() and asked_to_restart(chosen):
        chosen = chosen.replace(schedule__restart=True)
        words = [word for word in words if not word.startswith("schedule.restart=")]
        words.append("schedule.restart=true")
    if not _launched() or (read_place().is_main and not family.launcher_prints()):
        for line in recipe.notes_on_idle(options.get("recipe"), *rest):
            say(f"unused: {line}")
    with open_check_folder(chosen, options.get("check")) as check:
        if launch is not None:
            own = ("nproc=", "max_restarts=", "check=")
            arguments = [word for word in words if not word.startswith(own)]
            if check:
                # This launcher owns the folder, so it outlives ranks that are killed or restarted.
                arguments.append(f"check={check}")
            return launching.start(chosen, arguments, launch, restarts)
        launching.load_plugin(options.get("plugin"))
        from trainer.training import loop

        loop.run(chosen, own_process=True, check=check)
    return 0


def evaluate(words: Sequence[str]) -> int:
    """Evaluate a trained run in this process, as the rank that the environment names."""
    options, rest = split_arguments(words, LAUNCH_OPTIONS)
    if "checkpoint" not in options:
        raise RecipeError(
            "evaluate needs a run, one of its checkpoints or a file of weights: evaluate runs/x"
        )
    if wrong := options.keys() & {"recipe", "nproc", "max_restarts", "check"}:
        raise RecipeError(
            f"{min(wrong)}= is not for evaluate: the run has a recipe, and torchrun starts several "
            "ranks"
        )
    launching.load_plugin(options.get("plugin"))
    from trainer.commands import evaluate as trained

    interrupts.raise_at_ctrl_c()
    trained.evaluate_run(options["checkpoint"], *rest)
    return 0


def _launched() -> bool:
    try:
        return read_place().launched
    except TrainerError:
        return False


if __name__ == "__main__":
    main()

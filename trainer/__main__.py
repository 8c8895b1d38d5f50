"""`python -m trainer`: words -> command -> exit code."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # The working folder, where a random.py or yaml.py of the user's own would be taken for the library of that name.
    sys.path.append(sys.path.pop(0))

from trainer.processes import early

if __name__ == "__main__" or early.is_installed_command():
    early.install_handlers()  # before all other imports

import logging
import multiprocessing
import os
import platform
import signal
import time
from collections.abc import Sequence
from importlib import import_module

from trainer.errors import RecipeError, SetupError, TrainerError, explain
from trainer.processes.terminal import as_typed, name_installed_command, outlive_terminal, plain

try:
    from trainer import recipe
    from trainer.cli import guide
    from trainer.cli.command_table import COMMANDS
    from trainer.cli.grammar import read
    from trainer.launch import endings, launching, topology
    from trainer.processes import family, interrupts
    from trainer.processes.interrupts import exit_now, exit_python
    from trainer.processes.rank import place
    from trainer.recipe import key_reference
    from trainer.recipe.known_names import check_names
    from trainer.recipe.recipe_files import positive_integer, split_words
    from trainer.recipe.versions import VERSION, installed
    from trainer.saving.files import open_streams
    from trainer.saving.run_folder import asked_to_restart
except ModuleNotFoundError as fault:  # a library is missing, as after pip install --no-deps
    print(f"trainer: error: {as_typed(explain(fault)[0])}", file=sys.stderr)
    sys.exit(explain(fault)[1])

LAUNCH_WORDS = (*COMMANDS["train"].words, "checkpoint")
AS_THEY_ARE = ("submit", "recipes", "guide")  # commands whose texts tell themselves how this program was started


def main() -> None:
    """Run the command that the words name, and leave with its exit code."""
    open_streams()
    outlive_terminal()
    if early.is_installed_command():
        name_installed_command(sys.argv[0])
    code = answer(sys.argv[1:])
    if not code and multiprocessing.parent_process():  # a rank that our launcher forked, which waits for its return
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said; Ctrl-C in Python's own end would show a traceback
    if _launched() or interrupts.stuck.is_set():
        logging.shutdown()
        exit_now(code)
    exit_python(code)


def answer(words: Sequence[str]) -> int:
    """The exit code of a command, after printing the one line of what went wrong, if anything did."""
    try:
        family.die_with_parent()
        check_folder()
        return run(words)
    except (Exception, KeyboardInterrupt) as error:
        now = time.time()
        line, code = explain(error)
        own = code == TrainerError.code
        line = endings.with_stack(line, error) if own else endings.name_stopped_ranks(line, code, error)
    endings.write_report(line, code, now)
    if family.launcher_prints() or (_launched() and not place().is_main):
        endings.let_others_print(code)
    else:
        endings.say(line, code)
    return code


def check_folder() -> None:
    """Raises SetupError where the working folder was deleted, which neither torch nor relative paths survive."""
    try:
        os.getcwd()
    except OSError:
        raise SetupError("the working folder was deleted: type cd and a folder that is there, and try again") from None


def run(words: Sequence[str]) -> int:
    """Run one command."""
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
        _show(f"trainer {VERSION}, torch {installed('torch')}, Python {platform.python_version()}\n")
        return 0
    if command == "help":
        return show_help(rest)
    home = import_module(COMMANDS[command].home)
    if command != "doctor":
        interrupts.raise_at_ctrl_c()
    told: int | str = home.command(rest)
    if isinstance(told, int):
        return told
    _show(told if command in AS_THEY_ARE else as_typed(told))
    return 0


def show_help(words: Sequence[str]) -> int:
    """Print the page of the command that is among the words, or the first page."""
    named = [word.lstrip("-") for word in words if word.lstrip("-") in guide.pages()]
    _show(guide.command_page(named[0]) if named else guide.first(key_reference.listed("  ")))
    return 0


def train(words: Sequence[str]) -> int:
    """Train here, or in ranks that torch's launcher starts."""
    options, rest = split_words(words, LAUNCH_WORDS)
    if "checkpoint" in options:
        raise RecipeError("checkpoint= belongs to evaluate; to continue a run type output=runs/x resume=auto")
    chosen = recipe.load(options.get("recipe"), *rest)
    if "plugin" not in options:
        check_names(chosen)
    restarts = positive_integer("max_restarts", options.get("max_restarts")) or 0
    launch = launching.launch_to_start(chosen, options.get("nproc"), restarts)
    if not _launched() and asked_to_restart(chosen):
        chosen = chosen.replace(schedule__restart=True)
        words = [*(word for word in words if not word.startswith("schedule.restart=")), "schedule.restart=true"]
    if launch is not None:
        kept = [word for word in words if not word.startswith(("nproc=", "max_restarts="))]
        return launching.start(chosen, kept, launch, restarts)
    launching.load_plugin(options.get("plugin"))
    from trainer.training import loop

    loop.run(chosen, own_process=True)
    return 0


def evaluate(words: Sequence[str]) -> int:
    """Evaluate a trained run in this process, as the rank that the environment says."""
    options, rest = split_words(words, LAUNCH_WORDS)
    if "checkpoint" not in options:
        raise RecipeError("evaluate needs checkpoint=, a run folder or one of its checkpoints: checkpoint=runs/x")
    if wrong := options.keys() & {"recipe", "nproc", "max_restarts"}:
        raise RecipeError(f"{min(wrong)}= is not for evaluate: the run has a recipe, and torchrun starts several ranks")
    launching.load_plugin(options.get("plugin"))
    from trainer.commands import evaluate as trained

    interrupts.raise_at_ctrl_c()
    trained.evaluate_run(options["checkpoint"], *rest)
    return 0


def _show(text: str) -> None:
    try:
        print(plain(text), end="", flush=True)
    except BrokenPipeError:  # the reader, head say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _launched() -> bool:
    try:
        return place().launched
    except TrainerError:
        return False


if __name__ == "__main__":
    main()

"""`python -m trainer sweep`: which values of a recipe's keys train best, every trial an ordinary run.

Lists are tried in every combination, ranges are sampled by Optuna. The metric is of the held-out images; what is done
is kept, and the same words go on after a stop.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.commands.sweep.space import OWN_WORDS, SearchSpace
from trainer.commands.sweep.sweeping import sweep
from trainer.errors import RecipeError
from trainer.processes.rank import place
from trainer.recipe import shipped_recipes
from trainer.recipe.recipe_files import positive_integer, split_words


def command(words: Sequence[str]) -> int:
    """`python -m trainer sweep words...`: 0, or the exit code of the first trial that failed where none ended well.

    Raises:
        RecipeError: words that no trial could run with, before anything starts.
        SetupError: Optuna is not installed and a range is given, or the folder cannot be written.
        FolderInUseError: output= holds something else.
        Interrupted, Preempted: stopped; what was done is kept.
    """
    options, rest = split_words(words, OWN_WORDS)
    if place().launched:
        raise RecipeError("sweep starts its processes itself: type python -m trainer sweep ... without torchrun")
    if "recipe" not in options:
        raise RecipeError(f"sweep needs recipe=, as in recipe=digits; shipped: {', '.join(shipped_recipes())}")
    if options.get("resume", "auto") != "auto":
        raise RecipeError(f"resume={options['resume']} must be auto, and may be left out: the same words continue it")
    space = SearchSpace.of(
        options["recipe"],
        rest,
        repeats=positive_integer("repeats", options.get("repeats")) or 1,
        trials=positive_integer("trials", options.get("trials")),
        nproc=options.get("nproc"),
        plugin=options.get("plugin"),
    )
    return sweep(space, options.get("output"))

"""The words of `predict` without a key: photos, folders of them, and at most one run, in any order."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

from trainer.cli.command_table import COMMANDS
from trainer.errors import RecipeError
from trainer.recipe.reflection import defaults
from trainer.saving.run_names import HOME, is_run


def sorted_out(words: Sequence[str]) -> list[str]:
    """The words with the run among them as `checkpoint=`, and with paths that hold a "=" so that they are no key.

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

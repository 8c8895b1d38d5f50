"""The words of `predict` without =: photos, folders of them, and at most one run, in any order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from trainer.cli.dialects.meaning import CommandLine, Meaning, holds_runs
from trainer.cli.known_keys import COMMAND_WORDS, is_name
from trainer.cli.spelling import Word
from trainer.errors import RecipeError
from trainer.recipe.known_names import WEIGHTS_FILES
from trainer.recipe.reflection import defaults
from trainer.recipe.text import misspelt

HOME = "runs"  # where runs are, unless output= says otherwise
RUN_FILES = ("recipe.yaml", "last.safetensors", "manifest.json")
PHOTOS = (".jpg", ".jpeg", ".webp", ".heic", ".bmp", ".tif", ".tiff")  # as no run folder holds them


def sorted_out(words: Sequence[Word]) -> list[Word]:
    """The words with the run among them as `checkpoint=`, and with every path that is there as one word without a key.

    Raises:
        RecipeError: a word means two things, or two are runs.
    """
    words = [_sorted_out(word) for word in words]
    runs = list(dict.fromkeys(word.value for word in words if word.key == "checkpoint"))
    if len(runs) > 1:
        raise RecipeError(f"{runs[0]} and {runs[1]} are both runs: type one of them, as in predict {runs[0]} photo.jpg")
    return words


def _sorted_out(word: Word) -> Word:
    typed, path = word.typed, os.path.expanduser(word.typed)
    ours = word.key in defaults() or word.key in COMMAND_WORDS["predict"]
    if ours or (is_name(word.key) and not os.path.lexists(path)):
        return word
    below = os.path.join(HOME, typed)
    is_run, is_run_below = _is_run(path), _is_run(below)
    if is_run and os.path.isdir(path) and any(name.lower().endswith(PHOTOS) for name in os.listdir(path)):
        raise RecipeError(
            f"'{typed}' is a run and has photos: type checkpoint={typed} for the run, data.root={typed} for the photos"
        )
    if is_run_below and os.path.exists(path) and not is_run:
        raise RecipeError(f"'{typed}' is here, and {below} is a run: type ./{typed} for the first, {below} for the run")
    if is_run or is_run_below:
        return Word(typed, "checkpoint", typed)
    if os.path.lexists(path):
        return Word(os.path.join(".", typed) if "=" in typed.split(os.sep)[0] else typed)
    return word


def is_photos(word: Word) -> bool:
    """Whether a word names photos that are there, or - for paths from standard input."""
    path = os.path.expanduser(word.typed)
    return not word.key and (word.typed == "-" or (os.path.lexists(path) and not holds_runs(path)))


def what_is_meant(typed: str, line: CommandLine) -> Meaning:
    """What to type for a word that is no photo, folder or run."""
    folder, name = os.path.split(typed)
    paths: list[str] = []
    with suppress(OSError):
        paths = [os.path.join(folder, other) for other in os.listdir(os.path.expanduser(folder) or ".")]
    stems = {os.path.splitext(os.path.basename(path))[0]: path for path in paths}
    near = misspelt(os.path.splitext(name)[0], stems)
    if near is not None:
        return Meaning((stems[near],))
    runs = os.listdir(HOME) if os.path.isdir(HOME) and "checkpoint" not in line.values else []
    guess = misspelt(name, runs)
    if guess is not None:
        return Meaning((os.path.join(HOME, guess),))
    key = misspelt(name, defaults())
    return Meaning((), "no photo, folder or run of that name" + (f"; did you mean {key}=?" if key else ""))


def _is_run(path: str) -> bool:
    if os.path.isdir(path):
        return any(os.path.isfile(os.path.join(path, name)) for name in RUN_FILES)
    return path.endswith(WEIGHTS_FILES) and os.path.isfile(path)

"""Find the run that a user means by a path or by its name in runs/.

The module does not import torch, so a mistyped name is reported without delay.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import CheckpointError
from trainer.recipe import find_nearest
from trainer.recipe.known_names import WEIGHTS_FILES
from trainer.recipe.recipe_files import split_arguments

HOME = "runs"
# A folder that contains any of these files counts as a run. "recipe.yaml" exists from the start of
# a run, and "manifest.json" only in a checkpoint.
RUN_FILES = ("recipe.yaml", "last.safetensors", "manifest.json")
# Names of the weights of a run, which may follow its path, as in "runs/x last".
CHOICES = ("best", "last")


def is_run(path: str | Path, files: tuple[str, ...] = RUN_FILES) -> bool:
    """Return whether a path is a run folder, a checkpoint or a weights file.

    Args:
        path: path of a folder or a file.
        files: names of files. A folder that contains at least one of them counts as a run.
    """
    if os.path.isdir(path):
        return any(os.path.isfile(os.path.join(path, name)) for name in files)
    return str(path).endswith(WEIGHTS_FILES) and os.path.isfile(path)


def find_run_folder(path: Path, above: int = 3) -> Path | None:
    """Return the run folder that contains `path`, or None if it is outside of all runs.

    Args:
        path: path of a run folder, a checkpoint or a weights file.
        above: maximum number of parent directories to search.
    """
    for folder in (path, *path.absolute().parents[:above]):
        if (folder / RUN_FILES[0]).is_file():
            return folder
    return None


def find_run(name: str) -> Path:
    """Return the path of the run that the user means, or of the weights that are named after it.

    Args:
        name: a path, or a name in runs/. If both exist, the path is chosen unless only the folder
            in runs/ has weights or is a checkpoint. "RUN best" and "RUN last" are the weights files
            of that run.

    Raises:
        CheckpointError: neither exists, or the run has no such weights. The message suggests a run
            with a similar name, or other weights.
    """
    path = os.path.expanduser(name)
    candidates = [path]
    if path.split(os.sep)[0] not in (HOME, "", ".", ".."):
        candidates.append(os.path.join(HOME, path))
    existing = [Path(candidate) for candidate in candidates if os.path.exists(candidate)]
    run_name, _, choice = name.rpartition(" ")
    if not existing and run_name and choice in CHOICES:
        return _find_weights(find_run(run_name), choice)
    if not existing:
        nor = ""
        if len(candidates) > 1:
            nor = f", nor {HOME}/{name[:120]}"
        known_names = os.listdir(HOME) if os.path.isdir(HOME) else []
        guess = find_nearest(os.path.basename(path), known_names)
        if guess:
            hint = f"did you mean {HOME}/{guess}?"
        else:
            hint = f"give a run, or a file of weights; python -m trainer runs lists those in {HOME}"
        raise CheckpointError(f"'{name[:120]}' is not there{nor}: {hint}")
    for run in existing:
        if run.is_file() or is_run(run, RUN_FILES[1:]):
            return run
    return existing[0]


def _find_weights(run: Path, choice: str) -> Path:
    """Return the file with the weights `choice` of a run folder.

    Raises:
        CheckpointError: `run` is not a run folder, or has no such file.
    """
    if run.is_file() or (run / "manifest.json").exists():
        raise CheckpointError(f"{run} holds one set of weights: leave out '{choice}'")
    file = run / f"{choice}.safetensors"
    if file.is_file():
        return file
    names = [name for name in CHOICES if (run / f"{name}.safetensors").is_file()]
    checkpoints = sorted((run / "checkpoints").glob("step-*/manifest.json"))
    hint = "it has no weights yet"
    if names:
        hint = f"type '{run} {names[0]}'"
    elif checkpoints:
        hint = f"type {checkpoints[-1].parent}, its newest checkpoint"
    raise CheckpointError(f"{file} is not there: {hint}")


def is_choice(word: str) -> bool:
    """Return whether an argument names weights of a run, and not a run of that name."""
    if word not in CHOICES:
        return False
    return not is_run(word) and not is_run(os.path.join(HOME, word))


def split_choice(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split "best", "last", "checkpoint=best" or "checkpoint=last" from arguments.

    Returns:
        (suffix, rest): what follows the run's name for `find_run`, as in " last", or an empty text;
        and the other arguments.
    """
    named = [f"checkpoint={word}" if word in CHOICES else word for word in words]
    options, rest = split_arguments(named, ("checkpoint",))
    choice = options.get("checkpoint")
    if choice is None:
        return "", rest
    if choice not in CHOICES:
        raise CheckpointError(f"checkpoint={choice[:80]}: after a run, type best or last")
    return f" {choice}", rest


def newest_run() -> Path:
    """Return the folder in runs/ whose weights file was written last.

    Raises:
        CheckpointError: no folder in runs/ contains weights.
    """
    files = Path(HOME).glob("*/last.safetensors")
    weights = max(files, key=os.path.getmtime, default=None)
    if weights is None:
        raise CheckpointError(
            f"there is no trained run in {HOME}: train one, or give a run or a file of weights"
        )
    return weights.parent

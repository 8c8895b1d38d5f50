"""A run as people name it: by a path, or by its name below runs/. Imports no torch: a slip is reported at once."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.errors import CheckpointError
from trainer.recipe import nearest
from trainer.recipe.known_names import WEIGHTS_FILES

HOME = "runs"
RUN_FILES = ("recipe.yaml", "last.safetensors", "manifest.json")  # the first is a run's, the last a checkpoint's


def is_run(path: str | Path, files: tuple[str, ...] = RUN_FILES) -> bool:
    """Whether a path is a run folder, a checkpoint or a file of weights; of a folder, whether it has one of `files`."""
    if os.path.isdir(path):
        return any(os.path.isfile(os.path.join(path, name)) for name in files)
    return str(path).endswith(WEIGHTS_FILES) and os.path.isfile(path)


def run_folder(path: Path, above: int = 3) -> Path | None:
    """The folder of the run that weights at `path` are of: this one, or one at most so many `above`."""
    folders = (path, *path.absolute().parents[:above])
    return next((folder for folder in folders if (folder / RUN_FILES[0]).is_file()), None)


def run_named(name: str) -> Path:
    """What the user means: a path, or one below runs/; of both the one that holds weights.

    Raises:
        CheckpointError: there is neither; says which run may be meant.
    """
    path = os.path.expanduser(name)
    below = path if path.split(os.sep)[0] in (HOME, "", ".", "..") else os.path.join(HOME, path)
    candidates = list(dict.fromkeys((path, below)))
    there = [Path(candidate) for candidate in candidates if os.path.exists(candidate)]
    if not there:
        nor = f", nor {HOME}/{name[:120]}" if len(candidates) > 1 else ""
        guess = nearest(os.path.basename(path), os.listdir(HOME) if os.path.isdir(HOME) else [])
        hint = f"give a run, or a file of weights; python -m trainer runs lists those below {HOME}"
        hint = f"did you mean {HOME}/{guess}?" if guess else hint
        raise CheckpointError(f"'{name[:120]}' is not there{nor}: {hint}")
    good = [run for run in there if run.is_file() or is_run(run, RUN_FILES[1:])]
    return (good or there)[0]


def newest_run() -> Path:
    """The run below runs/ whose weights were written last. Raises CheckpointError where there is none."""
    weights = max(Path(HOME).glob("*/last.safetensors"), key=os.path.getmtime, default=None)
    if weights is None:
        raise CheckpointError(f"there is no trained run below {HOME}: train one, or give a run or a file of weights")
    return weights.parent

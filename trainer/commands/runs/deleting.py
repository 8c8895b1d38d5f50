"""Removing runs: asked for first, all or none, and only what runs write."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from trainer.commands.runs.run_status import RunSummary
from trainer.errors import FolderInUseError, Interrupted, RecipeError, SetupError
from trainer.saving import locks
from trainer.saving.files import remove, why
from trainer.telemetry import readable

WRITTEN = (  # by training and by commands on a run
    "recipe.yaml", "result.json", "steps.csv", "tuning.json", "split.csv", "contact_sheet.png", "timeline.*",
    "*events.out.tfevents.*", "checkpoints", "last.safetensors", "best.safetensors", "model*.safetensors",
    "model*.onnx", "model*.onnx.data", "model*.pt2", "model*.torchscript", "wandb", "wandb.json", "mlflow.json",
    "stacks-rank*.txt",
    ".lock", ".*.tmp", ".recipe.yaml.*", ".result.json.*", ".steps.csv.*", ".tuning.json.*", ".split.csv.*",
    ".contact_sheet.png.*", ".timeline.json.*", ".events.*", ".wandb.json.*", ".mlflow.json.*", ".export-*",
)  # fmt: skip
STOP = "stop it first (Ctrl-C, or kill its process)"


def delete(runs: Sequence[RunSummary], yes: str | None) -> str:
    """Remove runs once the user agrees; what no run wrote stays, with a line that says so.

    Args:
        yes: `true` where the user has agreed already.

    Raises:
        RecipeError: one is a link or the working folder, or nobody is there to ask.
        FolderInUseError: one of them is running; none is removed.
        SetupError: something cannot be removed.
    """
    if yes not in (None, "true", "false"):
        raise RecipeError(f"yes={yes} must be true or false")
    unique = list({run.path.resolve(): run for run in runs}.values())
    for run in unique:
        _check(run)
    if yes != "true" and not _agreed(unique, asked=yes is None):
        return "nothing was deleted\n"
    return "".join(f"{_delete(run)}\n" for run in unique)


def _check(run: RunSummary) -> None:
    if run.path.is_symlink():
        raise RecipeError(f"{run.path} is a link: give the run itself, {run.path.resolve()}, or remove the link")
    if run.path.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise RecipeError(f"{run.path.resolve()} is the folder you are in: cd .. and give its name")
    if run.status == "running":
        raise FolderInUseError(f"{run.path} is running: {STOP}; nothing was deleted")


def _agreed(runs: Sequence[RunSummary], asked: bool) -> bool:
    """Ask, with what would go."""
    if not asked:
        return False
    if sys.stdin is None or not sys.stdin.isatty():
        raise RecipeError("runs delete asks before it deletes, and nobody is there to answer: add yes=true")
    for run in runs:
        best = f", {run.best[0]} {readable.score(*run.best)}" if run.best else ""
        print(f"  {readable.plain(str(run.path))}: {run.status}{best}, {readable.as_size(run.size, run.more)}")
    try:
        answer = input(f"delete {'this run' if len(runs) == 1 else f'these {len(runs)} runs'}? y/N ")
    except EOFError:
        print()
        return False
    except KeyboardInterrupt:
        print()  # the line that was not ended
        raise Interrupted("stopped by Ctrl-C; nothing was deleted") from None
    return answer.strip().lower() in ("y", "yes")


def _delete(run: RunSummary) -> str:
    """Remove what a run wrote, its lock last, so that no other run begins in the folder meanwhile."""
    path = run.path
    try:
        lock = locks.hold(path, "run")
    except FolderInUseError:
        raise FolderInUseError(f"{path} is running: {STOP}") from None
    try:
        names = sorted(os.listdir(path), key=lambda name: name == ".lock")
        for name in names:
            if any(fnmatch(name, pattern) for pattern in WRITTEN):
                remove(path / name)
        left = sorted(os.listdir(path))
        still = [name for name in left if any(fnmatch(name, pattern) for pattern in WRITTEN)]
        if still:
            raise SetupError(f"{path / still[0]} cannot be removed: look at its owner and rights (ls -l)")
        if not left:
            path.rmdir()
    except SetupError:
        raise
    except OSError as error:
        raise SetupError(f"{path} cannot be removed ({why(error)}): look at its owner and rights (ls -l)") from None
    finally:
        os.close(lock)
    freed = readable.as_size(run.size, run.more)
    if not left:
        return f"deleted {readable.plain(str(path))} ({freed})"
    shown = readable.plain(", ".join(left[:3])) + f" and {len(left) - 3} more" * (len(left) > 3)
    return f"deleted the run in {readable.plain(str(path))}; left there, as no run wrote it: {shown}"

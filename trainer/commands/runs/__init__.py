"""`python -m trainer runs`: list runs, show one of them, or delete them.

All run folders are read, no matter which user wrote them or how the run ended. torch is not
imported.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from trainer.commands.runs.run_status import HOME, RunSummary, find_run, read_run, show
from trainer.errors import FolderInUseError, RecipeError, SetupError
from trainer.processes.terminal import ask_permission
from trainer.recipe import list_some, split_arguments
from trainer.saving import locks, run_folder
from trainer.saving.files import describe_error, remove
from trainer.saving.journal import JOURNAL
from trainer.telemetry.readable import (
    escape_control_characters,
    format_count,
    format_duration,
    format_number,
    format_size,
    format_table,
    wrap,
)

USAGE = "type runs, runs show RUN or runs delete RUN"
HEAD = ("run", "mode", "model", "status", "best", "images/s", "age", "size")
OF_RUN = (*run_folder.WRITTEN, JOURNAL)
# Patterns of the files that `delete` removes: those that training and other commands write into a
# run folder, and their temporary files.
WRITTEN = (
    *OF_RUN,
    *(f".{name}.*" for name in OF_RUN),
    "checkpoints",
    "last.safetensors",
    "best.safetensors",
    "metrics.csv",
    "model*.safetensors",
    "model*.onnx",
    "model*.onnx.data",
    "model*.pt2",
    "model*.torchscript",
    "wandb",
    "slurm-*.log",
    locks.LOCK,
    ".*.tmp",
    ".events.*",
    ".export-*",
)
STOP = "stop it first (Ctrl-C, or kill its process)"


def command(words: Sequence[str]) -> str:
    """Run `python -m trainer runs`, and return the text to print.

    Raises:
        RecipeError: An argument is wrong, or there is no such run.
        FolderInUseError: A run to be deleted is running.
        SetupError: A directory cannot be read or removed.
    """
    options, names = split_arguments(words, ("yes",))
    task = ""
    if names and names[0] in ("list", "show", "delete"):
        task = names.pop(0)
    unknown = []
    for name in names:
        is_path = os.path.lexists(name) or os.path.lexists(HOME / name)
        if (name.startswith("-") or "=" in name) and not is_path:
            unknown.append(name)
    if options and task != "delete":
        unknown.append("yes=")
    if unknown:
        usage = f"runs {task}".rstrip()
        raise RecipeError(f"'{unknown[0]}' is not an argument of {usage}: {USAGE}")
    if task == "delete" and names:
        return delete([find_run(name) for name in names], options.get("yes"))
    if task in ("show", "delete") and len(names) != 1:
        raise RecipeError(
            f"runs {task} needs the name of a run, as in runs {task} NAME; runs lists them"
        )
    if len(names) > 1:
        raise RecipeError(f"'{' '.join(names)[:80]}' is not understood: {USAGE}")
    if not names:
        return format_runs(HOME)
    name = names[0]
    if task != "show":
        for path in (Path(name).expanduser(), HOME / name):
            if path.is_dir() and read_run(path) is None:
                return format_runs(path)
    return show(find_run(name))


def format_runs(home: Path) -> str:
    """Return the table of all runs below a directory.

    Raises:
        SetupError: The directory cannot be read.
    """
    runs = list_runs(home) if home.is_dir() else []
    if not runs:
        return (
            f"no runs below {home}: python -m trainer recipe=digits output={home}/first trains "
            "one\n"
        )
    runs.sort(key=lambda run: -run.changed)
    rows: list[Sequence[str]] = [HEAD]
    notes = []
    for run in runs:
        cells = (
            str(run.path.relative_to(home)),
            run.mode or "-",
            run.model or "-",
            run.status,
            run.best or "-",
            format_number(run.speed),
            format_duration(max(0.0, time.time() - run.changed)),
            format_size(run.size),
        )
        # Text from run folders is untrusted, and its control characters could alter the terminal.
        rows.append(list(map(escape_control_characters, cells)))
        if run.note:
            notes.append(wrap("", escape_control_characters(f"{cells[0]}: {run.note}")))
    lines = format_table(rows, {5, 6, 7})
    if notes:
        lines += ["", *notes]
    # A run that is also reached through a link counts once.
    unique = {run.path.resolve(): run for run in runs}.values()
    size = format_size(sum(run.size for run in unique))
    lines += [
        "",
        f"{format_count(len(unique), 'run')}, {size}; see one: python -m trainer runs show NAME",
        "",
    ]
    return "\n".join(lines)


def list_runs(home: Path, levels: int = 2) -> list[RunSummary]:
    """Return the runs below a directory, at most `levels` levels deep.

    Two levels reach runs/paper/seed3 from runs.

    Raises:
        SetupError: The directory cannot be read.
    """
    try:
        names = sorted(name for name in os.listdir(home) if not name.startswith("."))
    except OSError as error:
        raise SetupError(
            f"{home} cannot be read ({describe_error(error)}): give another folder, as in runs "
            "FOLDER"
        ) from None
    runs = []
    for name in names:
        path = home / name
        if (run := read_run(path)) is not None:
            runs.append(run)
        elif levels > 1 and not path.is_symlink() and os.path.isdir(path):
            with suppress(SetupError):
                runs += list_runs(path, levels - 1)
    return runs


def delete(runs: Sequence[RunSummary], yes: str | None) -> str:
    """Delete runs, and return the text to print; files that no run wrote are kept.

    Args:
        runs: Runs to delete.
        yes: Value of yes=: "true" deletes, "false" deletes nothing, None asks the user.

    Raises:
        RecipeError: `yes` is wrong, or a run is a link or contains the current directory.
        FolderInUseError: A run is running.
        SetupError: A file cannot be removed.
    """
    if yes not in (None, "true", "false"):
        raise RecipeError(f"yes={yes} must be true or false")
    unique = list({run.path.resolve(): run for run in runs}.values())
    for run in unique:
        if run.path.is_symlink():
            raise RecipeError(
                f"{run.path} is a link: give the run itself, {run.path.resolve()}, or remove the "
                "link"
            )
        here = Path.cwd()
        if run.path.resolve() in (here, *here.parents):
            raise RecipeError(
                f"{run.path.resolve()} is the folder you are in: cd .. and give its name"
            )
        if run.status == "running":
            raise FolderInUseError(f"{run.path} is running: {STOP}; nothing was deleted")
    lines = []
    for run in unique:
        line = f"  {run.path}: {run.status}"
        if run.best:
            line += f", {run.best}"
        lines.append(escape_control_characters(f"{line}, {format_size(run.size)}"))
    if yes is None:
        question = f"delete {format_count(len(unique), 'run')}?"
        yes = "true" if ask_permission("runs delete", "\n".join(lines), question) else "false"
    if yes == "false":
        return "nothing was deleted\n"
    return "".join(f"{_delete(run)}\n" for run in unique)


def _delete(run: RunSummary) -> str:
    """Remove the files that a run wrote, and return the line to print.

    The lock is removed last, so that no other run starts in the folder meanwhile.
    """
    path = run.path
    try:
        lock = locks.lock_folder(path, "run")
    except FolderInUseError:
        raise FolderInUseError(f"{path} is running: {STOP}") from None
    try:
        for name in sorted(os.listdir(path), key=lambda name: name == locks.LOCK):
            if _is_written(name):
                remove(path / name)
        kept = sorted(os.listdir(path))
        for name in kept:
            if _is_written(name):
                raise SetupError(
                    f"{path / name} cannot be removed: check its owner and permissions (ls -l)"
                )
        if not kept:
            path.rmdir()
    except SetupError:
        raise
    except OSError as error:
        raise SetupError(
            f"{path} cannot be removed ({describe_error(error)}): check its owner and permissions "
            "(ls -l)"
        ) from None
    finally:
        os.close(lock)
    shown_path = escape_control_characters(str(path))
    if not kept:
        return f"deleted {shown_path} ({format_size(run.size)})"
    return (
        f"deleted the run in {shown_path}; kept, because no run wrote it: "
        f"{escape_control_characters(list_some(kept, 3))}"
    )


def _is_written(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in WRITTEN)

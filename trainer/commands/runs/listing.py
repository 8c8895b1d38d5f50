"""The runs below a folder, one line each, newest first; and removing them: asked for first, all or none, and only what
runs write."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from trainer.commands.runs.run_status import FOREIGN, RunSummary, look
from trainer.errors import FolderInUseError, RecipeError, SetupError
from trainer.processes.terminal import agreed
from trainer.saving import locks
from trainer.saving.files import remove, why
from trainer.telemetry import readable

DEEP = 2  # levels of folders that hold no run themselves, as in runs/paper/seed3
MOST = 20  # notes on runs and other folders
HEAD = ("run", "mode", "model", "status", "best", "images/s", "age", "size")
RIGHT = {5, 6, 7}
WRITTEN = (  # by training and by commands on a run
    "recipe.yaml", "result.json", "steps.csv", "tuning.json", "split.csv", "skipped.csv", "worst.csv",
    "contact_sheet.png", "timeline.*",
    "*events.out.tfevents.*", "checkpoints", "last.safetensors", "best.safetensors", "model*.safetensors",
    "model*.onnx", "model*.onnx.data", "model*.pt2", "model*.torchscript", "wandb", "wandb.json", "mlflow.json",
    "stacks-rank*.txt", "journal.jsonl", "slurm-*.log",
    ".lock", ".*.tmp", ".recipe.yaml.*", ".result.json.*", ".steps.csv.*", ".tuning.json.*", ".split.csv.*",
    ".skipped.csv.*", ".worst.csv.*", ".journal.jsonl.*",
    ".contact_sheet.png.*", ".timeline.json.*", ".events.*", ".wandb.json.*", ".mlflow.json.*", ".export-*",
)  # fmt: skip
STOP = "stop it first (Ctrl-C, or kill its process)"


def table(home: Path, as_json: bool = False) -> str:
    """What `runs` prints. Raises SetupError."""
    summaries = below(home)
    runs = sorted((run for run in summaries if run.kind == "run"), key=lambda run: -(run.changed or 0.0))
    others = [run for run in summaries if run.kind != "run"]
    if as_json:
        return json.dumps([run.to_dict() for run in (*runs, *others)], indent=2) + "\n"
    if not runs and not others:
        return f"no runs below {home}: python -m trainer recipe=digits output={home}/first trains one\n"
    lines = _table(runs, home) if runs else [f"no runs below {home}"]
    notes = [f"{_name(run, home)}: {readable.plain(run.note)}" for run in (*runs, *others) if run.note]
    more = [f"and {len(notes) - MOST} more lines like these"] if len(notes) > MOST else []
    lines += ["", *(readable.shortened(line, readable.columns()) for line in notes[:MOST]), *more] if notes else []
    if runs:
        apart = {run.path.resolve(): run for run in runs}.values()  # links name some twice
        total = readable.as_size(sum(run.size or 0 for run in apart), any(run.more for run in apart))
        lines += ["", f"{len(apart)} run{'s' * (len(apart) != 1)}, {total}; see one: python -m trainer runs show NAME"]
    return "\n".join(lines) + "\n"


def below(home: Path, levels: int = DEEP) -> list[RunSummary]:
    """Every run below a folder, and what else is there: comparisons, damaged or foreign folders, dead links.

    A folder that holds runs is no row itself. Plain files and hidden folders are left out. Raises SetupError.
    """
    try:
        with os.scandir(home) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and _may_hold(entry))
    except OSError as error:
        raise SetupError(f"{home} cannot be read ({why(error)}): give another folder, as in runs FOLDER") from None
    summaries = []
    for name in names:
        summary = look(home / name)
        within: list[RunSummary] = []
        if summary.note == FOREIGN and levels > 1 and not summary.path.is_symlink():
            with suppress(SetupError):
                within = [run for run in below(summary.path, levels - 1) if run.kind == "run"]
        summaries += within or [summary]
    return summaries


def _may_hold(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir() or (entry.is_symlink() and not os.path.exists(entry.path))
    except OSError:  # links in a circle
        return True


def _name(run: RunSummary, home: Path) -> str:
    return readable.plain(str(run.path.relative_to(home)))


def _cells(run: RunSummary, home: Path) -> tuple[str, ...]:
    best = run.best
    return (
        _name(run, home),
        readable.shortened(readable.plain(run.mode or "-"), 12),
        readable.shortened(readable.plain(run.model or "-"), 18),
        run.status or "-",
        f"{readable.shortened(readable.plain(best[0]), 10)} {readable.score(*best)}" if best else "-",
        readable.number(run.speed),
        readable.duration(run.age),
        readable.as_size(run.size, run.more),
    )


def _table(runs: Sequence[RunSummary], home: Path) -> list[str]:
    """Rows of equal columns; a name too long for its column stands on a line of its own, whole, to be copied."""
    rows = [HEAD, *(_cells(run, home) for run in runs)]
    others = readable.table([row[1:] for row in rows], {n - 1 for n in RIGHT})
    room = max(len(HEAD[0]), readable.columns() - max(map(len, others)) - 2)
    lines = readable.table([(row[0] if len(row[0]) <= room else "", *row[1:]) for row in rows], RIGHT)
    above = [[] if len(row[0]) <= room else [readable.shortened(row[0], readable.WIDEST)] for row in rows]
    return [line for whole, row in zip(above, lines, strict=True) for line in (*whole, row)]


def delete(runs: Sequence[RunSummary], yes: str | None) -> str:
    """Remove runs once the user agrees, or has agreed by yes=true; what no run wrote stays, with a line that says so.
    Raises RecipeError, FolderInUseError, SetupError.
    """
    if yes not in (None, "true", "false"):
        raise RecipeError(f"yes={yes} must be true or false")
    unique = list({run.path.resolve(): run for run in runs}.values())
    for run in unique:
        _check(run)
    if yes != "true" and not (yes is None and agreed("runs delete", *_question(unique))):
        return "nothing was deleted\n"
    return "".join(f"{_delete(run)}\n" for run in unique)


def _check(run: RunSummary) -> None:
    if run.path.is_symlink():
        raise RecipeError(f"{run.path} is a link: give the run itself, {run.path.resolve()}, or remove the link")
    if run.path.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise RecipeError(f"{run.path.resolve()} is the folder you are in: cd .. and give its name")
    if run.status == "running":
        raise FolderInUseError(f"{run.path} is running: {STOP}; nothing was deleted")


def _question(runs: Sequence[RunSummary]) -> tuple[str, str]:
    """What would go, and whether that is wanted."""
    lines = []
    for run in runs:
        best = f", {run.best[0]} {readable.score(*run.best)}" if run.best else ""
        lines.append(f"  {readable.plain(str(run.path))}: {run.status}{best}, {readable.as_size(run.size, run.more)}")
    return "\n".join(lines), f"delete {'this run' if len(runs) == 1 else f'these {len(runs)} runs'}?"


def _delete(run: RunSummary) -> str:
    """Remove what a run wrote, its lock last, so that no other run begins in the folder meanwhile."""
    path = run.path
    try:
        lock = locks.hold(path, "run")
    except FolderInUseError:
        raise FolderInUseError(f"{path} is running: {STOP}") from None
    try:
        for name in sorted(os.listdir(path), key=lambda name: name == ".lock"):
            if _is_written(name):
                remove(path / name)
        left = sorted(os.listdir(path))
        if still := [name for name in left if _is_written(name)]:
            raise SetupError(f"{path / still[0]} cannot be removed: check its owner and permissions (ls -l)")
        if not left:
            path.rmdir()
    except SetupError:
        raise
    except OSError as error:
        raise SetupError(f"{path} cannot be removed ({why(error)}): check its owner and permissions (ls -l)") from None
    finally:
        os.close(lock)
    freed = readable.as_size(run.size, run.more)
    if not left:
        return f"deleted {readable.plain(str(path))} ({freed})"
    shown = readable.plain(", ".join(left[:3])) + f" and {len(left) - 3} more" * (len(left) > 3)
    return f"deleted the run in {readable.plain(str(path))}; kept, because no run wrote it: {shown}"


def _is_written(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in WRITTEN)

"""The runs below a folder, one line each, newest first."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from trainer.commands.runs.run_status import FOREIGN, RunSummary, look
from trainer.errors import SetupError
from trainer.saving.files import why
from trainer.telemetry import readable

DEEP = 2  # levels of folders that hold no run themselves, as in runs/paper/seed3
MOST = 20  # notes on runs and other folders
HEAD = ("run", "mode", "model", "status", "best", "images/s", "age", "size")
RIGHT = {5, 6, 7}


def table(home: Path, as_json: bool = False) -> str:
    """What `runs` prints.

    Raises:
        SetupError: the folder cannot be read.
    """
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

    A folder that holds runs is no row itself. Plain files and hidden folders are left out.

    Raises:
        SetupError: the folder itself cannot be read.
    """
    try:
        with os.scandir(home) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and _may_hold(entry))
    except OSError as error:
        raise SetupError(f"{home} cannot be read ({why(error)}): give another folder, as in runs FOLDER") from None
    summaries = []
    for name in names:
        summary = look(home / name)
        inner: Sequence[RunSummary] = ()
        if summary.note == FOREIGN and levels > 1 and not summary.path.is_symlink():
            try:
                inner = below(summary.path, levels - 1)
            except SetupError:
                inner = ()
        within = [run for run in inner if run.kind == "run"]
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

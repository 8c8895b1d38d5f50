"""steps.csv of a run folder: written row by row, read as it may be found."""

from __future__ import annotations

import csv
import errno
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.saving.files import AppendFile, draft_of, opened, put, why

STEP_COLUMNS = ("step", "epoch", "seconds", "train_loss", "lr", "samples_per_sec", "skipped")
HEAD = ",".join(STEP_COLUMNS).encode()
MAX_STEPS_FILE, MAX_LINE = 4 * 2**30, 1000  # bytes
_NUMBER = re.compile(rb"-?[0-9]{1,18}(\.[0-9]{1,30})?(e[+-]?[0-9]{1,3})?|-?inf|nan")


def read_steps(path: Path) -> tuple[list[dict[str, str]], int]:
    """The rows of a steps.csv by step, and how many lines were damaged. A last line that was not ended is no row yet.

    Raises:
        OSError: it cannot be read, or is far larger than any run's.
    """
    by_step: dict[int, dict[str, str]] = {}
    bad = 0
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_STEPS_FILE:
            raise OSError(errno.EFBIG, f"it is larger than {MAX_STEPS_FILE:,} bytes")
        torn = b""
        for piece in iter(lambda: file.readline(MAX_LINE), b""):
            line, torn = (torn + piece)[:MAX_LINE], b""
            if not piece.endswith(b"\n"):
                torn = line
            elif (row := _row(line)) is not None:
                by_step[int(row["step"])] = row
            else:
                bad += line.strip() != HEAD
    return [by_step[step] for step in sorted(by_step)], bad


def _row(line: bytes) -> dict[str, str] | None:
    """A line of steps.csv; None where it is none."""
    cells = line.rstrip(b"\r\n").split(b",")
    numbers = [cell or b"0" * (place == 5) for place, cell in enumerate(cells)]  # no speed while a run warms up
    if len(cells) != len(STEP_COLUMNS) or not all(_NUMBER.fullmatch(cell) for cell in numbers):
        return None
    row = dict(zip(STEP_COLUMNS, (cell.decode() for cell in cells), strict=True))
    return row if row["step"].isdigit() and row["epoch"].isdigit() else None


class StepsFile(AppendFile):
    """steps.csv: one row a logged step. A resumed run drops the rows after its checkpoint, and damaged ones."""

    def __init__(self, folder: Path, last_step: int, warn: Callable[[str], None] = lambda line: None) -> None:
        path = folder / "steps.csv"
        rows: list[dict[str, str]] = []
        bad = 0
        if os.path.lexists(path) and last_step:
            try:
                rows, bad = read_steps(path)
            except OSError as error:
                warn(f"{path} is left out: {why(error)}")
        if bad:
            warn(f"{path}: {bad} damaged line{'s' * (bad > 1)} left out")
        draft = draft_of(path)
        self._file = draft.open("w", newline="")
        try:
            self._writer = csv.DictWriter(self._file, STEP_COLUMNS)
            self._writer.writeheader()
            self._writer.writerows(row for row in rows if int(row["step"]) <= last_step)
            self.flush()
            put(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def add(self, row: Mapping[str, Any]) -> None:
        """A row; readers see it within about a second."""
        self._writer.writerow(row)
        if time.monotonic() - self._flushed > 1:
            self.flush()

"""Write steps.csv and epochs.csv of a run folder, and read them even if some lines are damaged."""

import csv
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.processes.terminal import Say
from trainer.saving.files import (
    AppendFile,
    describe_error,
    open_regular,
    replace_file,
    temporary_path,
)

STEP_COLUMNS = ("step", "epoch", "seconds", "train_loss", "lr", "samples_per_sec", "skipped")
# First columns of epochs.csv. The metrics follow, as they are named in result.json.
EPOCH_COLUMNS = ("epoch", "step", "train_loss", "seconds", "lr", "samples_per_sec")
_EPOCHS_HEAD = ",".join(EPOCH_COLUMNS)
# Maximum size of a file and maximum length of a line in bytes. A larger file is refused, and a
# longer line counts as damaged. This bounds time and memory if another file has the name of a
# table.
MAX_FILE = 4 * 2**30
MAX_LINE = 10_000
_NUMBER = re.compile(rb"-?[0-9]{1,18}(\.[0-9]{1,30})?(e[+-]?[0-9]{1,3})?|-?inf|nan")
Rows = list[dict[str, str]]
# Columns, rows sorted by step, and number of damaged lines.
Table = tuple[Sequence[str], Rows, int]


def read_steps(path: Path) -> tuple[Rows, int]:
    """Read a steps.csv file, which may be damaged.

    A last line without a line break is ignored, because its writer has not finished it.

    Args:
        path: path of the file.

    Returns:
        (rows, damaged): the rows sorted by step, and the number of damaged lines. If several rows
        have the same step, only the last of them is returned.

    Raises:
        OSError: the file cannot be read, or is far larger than that of any run.
    """
    _, rows, damaged = read_table(path, STEP_COLUMNS)
    return rows, damaged


def read_table(path: Path, columns: Sequence[str]) -> Table:
    """Read a steps.csv or an epochs.csv.

    Args:
        path: path of the file.
        columns: columns of the file. Empty for an epochs.csv, whose first line names them.

    Returns:
        The columns of the file, and its rows and damaged lines as `read_steps` does.

    Raises:
        OSError: the file cannot be read, or is far larger than that of any run.
    """
    by_step = {}
    damaged = 0
    with open_regular(path, MAX_FILE) as file:
        line = b""
        for chunk in iter(lambda: file.readline(MAX_LINE), b""):
            line = (line + chunk)[:MAX_LINE]
            # A chunk without a line break belongs to a line that is longer than MAX_LINE, or it is
            # the unfinished last line. Continue with the next chunk, if any.
            if not chunk.endswith(b"\n"):
                continue
            text = line.rstrip(b"\r\n")
            line = b""
            if not columns and text.startswith(_EPOCHS_HEAD.encode()):
                # The name of a metric may contain commas, and is then quoted.
                columns = next(csv.reader([text.decode(errors="replace")]))
                continue
            row = _parse_row(text, columns)
            if row:
                by_step[int(row["step"])] = row
            elif text.strip() != ",".join(columns).encode():
                damaged += 1
    rows = [by_step[step] for step in sorted(by_step)]
    return columns, rows, damaged


def _parse_row(line: bytes, columns: Sequence[str]) -> dict[str, str] | None:
    """Return the cells of a line by column, or None if it is damaged or the header."""
    cells = line.split(b",")
    if len(cells) != len(columns):
        return None
    row = {}
    for column, cell in zip(columns, cells, strict=True):
        # The speed is empty while a run warms up, and a metric if it was not computed.
        may_be_empty = column == "samples_per_sec" or column.startswith("val_")
        is_empty = may_be_empty and not cell
        if not is_empty and not _NUMBER.fullmatch(cell):
            return None
        row[column] = cell.decode()
    # A single cell may be damage of a file whose head is missing.
    if row.get("step", "").isdigit() and row["epoch"].isdigit():
        return row
    return None


class _Table(AppendFile):
    """Writer of a table that a resumed run continues."""

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        fixed: Sequence[str],
        last_step: int,
        warn: Say,
    ) -> None:
        """Create the file. For a resumed run, keep its rows up to `last_step`.

        Rows after `last_step` and damaged lines are removed.

        Args:
            path: path of the file.
            columns: columns of a new file.
            fixed: columns that every file of this kind has; empty to read them from its first line.
            last_step: step of the checkpoint that is resumed, or 0.
            warn: called with one line about damage.
        """
        self._path = path
        rows: Rows = []
        damaged = 0
        if os.path.lexists(path) and last_step:
            try:
                stored_columns, rows, damaged = read_table(path, fixed)
                columns = tuple(dict.fromkeys((*columns, *stored_columns)))
            except OSError as error:
                warn(f"{path} is left out: {describe_error(error)}")
        if damaged:
            warn(f"{path}: damaged lines left out: {damaged}")
        kept = [row for row in rows if int(row["step"]) <= last_step]
        self._rewrite(columns, kept)

    def _rewrite(self, columns: Sequence[str], rows: Rows) -> None:
        draft = temporary_path(self._path)
        self._columns = columns
        self._file = draft.open("w", newline="", encoding="utf-8")
        try:
            self._writer = csv.DictWriter(self._file, columns)
            self._writer.writeheader()
            self._writer.writerows(rows)
            self.flush()
            replace_file(draft, self._path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


class StepsFile(_Table):
    """Writer of steps.csv, which has one row per logged step."""

    def __init__(self, folder: Path, last_step: int, warn: Say) -> None:
        super().__init__(folder / "steps.csv", STEP_COLUMNS, STEP_COLUMNS, last_step, warn)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row, and flush the file if the last flush was more than a second ago."""
        self._writer.writerow(row)
        if time.monotonic() - self._flushed > 1:
            self.flush()


class EpochsFile(_Table):
    """Writer of epochs.csv, which has one row per evaluation.

    The columns are those of all rows: a resumed run may have other metrics.
    """

    def __init__(self, folder: Path, last_step: int, warn: Say) -> None:
        """Create the file as `StepsFile` does. `last_step` is the last evaluated step to keep."""
        super().__init__(folder / "epochs.csv", EPOCH_COLUMNS, (), last_step, warn)
        self._last_step = last_step

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row, or replace the last one if it is of the same step.

        It reaches the file in one piece, so that a kill cannot cut it.
        """
        columns = tuple(dict.fromkeys((*self._columns, *row)))
        if columns != self._columns or row["step"] == self._last_step:
            _, rows, _ = read_table(self._path, ())
            self.close()
            self._rewrite(columns, [one for one in rows if one["step"] != str(row["step"])])
        self._last_step = row["step"]
        self._writer.writerow(row)
        self.flush()

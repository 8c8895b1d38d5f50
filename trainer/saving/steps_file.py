"""Write the steps.csv of a run folder, and read it even if some lines are damaged."""

import csv
import errno
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.saving.files import (
    AppendFile,
    describe_error,
    open_regular,
    replace_file,
    temporary_path,
)

STEP_COLUMNS = ("step", "epoch", "seconds", "train_loss", "lr", "samples_per_sec", "skipped")
HEAD = ",".join(STEP_COLUMNS).encode()
# Maximum size of the file and maximum length of a line in bytes. A larger file is refused, and a
# longer line counts as damaged. This bounds time and memory if another file has the name steps.csv.
MAX_STEPS_FILE = 4 * 2**30
MAX_LINE = 1000
_NUMBER = re.compile(rb"-?[0-9]{1,18}(\.[0-9]{1,30})?(e[+-]?[0-9]{1,3})?|-?inf|nan")


def read_steps(path: Path) -> tuple[list[dict[str, str]], int]:
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
    by_step = {}
    damaged = 0
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_STEPS_FILE:
            raise OSError(errno.EFBIG, f"it is larger than {MAX_STEPS_FILE:,} bytes")
        line = b""
        for chunk in iter(lambda: file.readline(MAX_LINE), b""):
            line = (line + chunk)[:MAX_LINE]
            # A chunk without a line break belongs to a line that is longer than MAX_LINE, or it is
            # the unfinished last line. Continue with the next chunk, if any.
            if not chunk.endswith(b"\n"):
                continue
            row = _parse_row(line)
            if row:
                by_step[int(row["step"])] = row
            elif line.strip() != HEAD:
                damaged += 1
            line = b""
    return [by_step[step] for step in sorted(by_step)], damaged


def _parse_row(line: bytes) -> dict[str, str] | None:
    """Return the cells of a line by column, or None if it is damaged or the header."""
    cells = line.rstrip(b"\r\n").split(b",")
    if len(cells) != len(STEP_COLUMNS):
        return None
    row = {}
    for column, cell in zip(STEP_COLUMNS, cells, strict=True):
        # The speed is empty while a run warms up.
        is_empty_speed = column == "samples_per_sec" and not cell
        if not is_empty_speed and not _NUMBER.fullmatch(cell):
            return None
        row[column] = cell.decode()
    if row["step"].isdigit() and row["epoch"].isdigit():
        return row
    return None


class StepsFile(AppendFile):
    """Writer of steps.csv, which has one row per logged step."""

    def __init__(
        self, folder: Path, last_step: int, warn: Callable[[str], None] = lambda line: None
    ) -> None:
        """Create steps.csv. For a resumed run, keep its rows up to `last_step`.

        Rows after `last_step` and damaged lines are removed.

        Args:
            folder: run folder.
            last_step: step of the checkpoint that is resumed, or 0.
            warn: called with one line about damage.
        """
        path = folder / "steps.csv"
        rows: list[dict[str, str]] = []
        damaged = 0
        if os.path.lexists(path) and last_step:
            try:
                rows, damaged = read_steps(path)
            except OSError as error:
                warn(f"{path} is left out: {describe_error(error)}")
        if damaged:
            warn(f"{path}: damaged lines left out: {damaged}")
        draft = temporary_path(path)
        self._file = draft.open("w", newline="")
        try:
            self._writer = csv.DictWriter(self._file, STEP_COLUMNS)
            self._writer.writeheader()
            self._writer.writerows(row for row in rows if int(row["step"]) <= last_step)
            self.flush()
            replace_file(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row, and flush the file if the last flush was more than a second ago."""
        self._writer.writerow(row)
        if time.monotonic() - self._flushed > 1:
            self.flush()

"""The text of a table of labels: its lines and their cells, whichever separator and line ends a program writes."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from trainer.errors import SetupError

SEPARATORS = "\t", ",", ";", "|"  # between columns: the first that the first line holds; others may be in its cells
NAMED = re.compile(r"sep=(.)\r?\n")  # Excel's line that names it
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+")
NUMBER = re.compile(r"[-+\d.,eE]+")


class Line(NamedTuple):
    """A line that is not empty."""

    number: int
    cells: list[str]


class Lines(NamedTuple):
    """A table's first line, the others, and the separator."""

    first: list[str]
    others: list[Line]
    separator: str


def read_lines(path: Path) -> Lines:
    """The lines of a table that are not empty: at least two, with the same number of cells each, at least two.

    Raises:
        SetupError: it cannot be read, or is no such table.
    """
    text = _text(path)
    named = NAMED.match(text)
    text = text[named.end() :] if named else text
    start = text.lstrip("\r\n").partition("\n")[0]
    separator = named[1] if named else next((mark for mark in SEPARATORS if mark in start), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        lines = [Line(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    except csv.Error as error:
        raise SetupError(f"data.labels={path} cannot be read (line {reader.line_num}: {error})") from None
    if len(lines) < 2 or len(lines[0].cells) < 2:
        raise SetupError(
            f"data.labels={path} needs a header and rows with commas between their cells, such as file,label and "
            "train/cat-1.jpg,cat below it"
        )
    first = lines[0].cells
    for number, cells in lines[1:]:
        if len(cells) != len(first):
            several = "; classes of one image with ; between them need commas between columns" * (separator == ";")
            raise SetupError(f"{path}, line {number}: {len(cells)} cells, and the header has {len(first)}{several}")
    return Lines(first, lines[1:], separator)


def check_commas(path: Path, column: str, cells: Iterable[tuple[int, str]]) -> None:
    """Refuse a column of numbers, each with its line, whose commas may stand between thousands or before decimals.

    Raises:
        SetupError: each comma may, or there are dots too.
    """
    cells = list(cells)
    commas = [(number, cell) for number, cell in cells if "," in cell]
    dots = any("." in cell for _, cell in cells)
    grouped = all(THOUSANDS.fullmatch(cell) for _, cell in commas)
    if commas and (dots or grouped) and all(NUMBER.fullmatch(cell) for _, cell in commas):
        number, cell = commas[0]
        raise SetupError(
            f"{path}, line {number}: the comma of {cell} in {column} may stand before decimals or between thousands: "
            "write a dot before decimals and nothing between thousands, in each line"
        )


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
        if "\0" in text[:1000]:
            raise UnicodeDecodeError("utf-8", data, 0, 1, "it holds zero bytes")
    except OSError as error:
        raise SetupError(f"data.labels={path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SetupError(
            f"data.labels={path} cannot be read: line {line} is not text in UTF-8; save it as UTF-8 (Excel: Save As, "
            "CSV UTF-8)"
        ) from None
    return text

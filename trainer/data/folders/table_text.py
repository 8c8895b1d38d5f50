"""The text of a table of labels: its lines and their cells, however a program separates and saves them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from trainer.errors import SetupError

COMPRESSED = {  # how compressed files begin, and what unpacks them
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ\0": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"\x04\x22\x4d\x18": "unlz4",
}

SEPARATORS = "\t", ",", ";", "|"  # between columns: the first that the first line holds; others may be in its cells
NAMED = re.compile(r"sep=(.)\r?\n")  # the line by which Excel tells it
UTF_16 = b"\xff\xfe", b"\xfe\xff"  # how such a file begins
SAVE = "save it as UTF-8 (Excel: Save As, CSV UTF-8)"
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+")  # what a comma may stand between
ROW_NAMES = "as R writes its row names: leave them out, write.csv(table, file, row.names=FALSE)"
NUMBER = re.compile(r"[-+\d.,eE]+")


class Line(NamedTuple):
    """A line that holds something."""

    number: int
    cells: list[str]


class Lines(NamedTuple):
    """A table's first line, the others, and what stands between the cells of each."""

    first: list[str]
    others: list[Line]
    separator: str


def read_lines(path: Path) -> Lines:
    """The lines of a table that hold something: two at least, with as many cells each, and of those two at least.

    Raises:
        SetupError: it cannot be read, or is no such table; the sentence says where and what to do.
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
        check_blanks(path, text)
        raise SetupError(
            f"data.labels={path} needs a header and rows, such as file,label and train/cat-1.jpg,cat below it"
        )
    first = lines[0].cells
    for number, cells in lines[1:]:
        if len(cells) != len(first):
            if separator != ";" and all(len(row.cells) == len(first) + 1 for row in lines[1:]):
                raise SetupError(f"{path}, line {number}: each row has one cell more than the header, {ROW_NAMES}")
            several = "; classes of one image with ; between them need commas between columns" * (separator == ";")
            raise SetupError(f"{path}, line {number}: {len(cells)} cells, and the header has {len(first)}{several}")
    return Lines(first, lines[1:], separator)


def check_blanks(path: Path, text: str) -> None:
    """Refuse a table with blanks between its cells, as R's write.table makes it.

    Raises:
        SetupError: what to write instead.
    """
    try:
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=" ") if any(row)]
    except csv.Error:
        return
    widths = {len(row) for row in rows[1:]}
    if len(widths) == 1 and len(rows[0]) > 1 and widths <= {len(rows[0]), len(rows[0]) + 1}:
        row_names = f", and {ROW_NAMES}" if len(rows[0]) not in widths else ""
        raise SetupError(f"data.labels={path} seems to have blanks between its columns: write commas there{row_names}")


def check_commas(path: Path, column: str, cells: Iterable[tuple[int, str]]) -> None:
    """Refuse a column of numbers, each with its line, whose commas may stand between thousands.

    Raises:
        SetupError: each comma may, or `.` is there too; the sentence says what to write.
    """
    cells = list(cells)
    commas = [(number, cell) for number, cell in cells if "," in cell]
    dots = any("." in cell for _, cell in cells)
    grouped = all(THOUSANDS.fullmatch(cell) for _, cell in commas)
    if commas and (dots or grouped) and all(NUMBER.fullmatch(cell) for _, cell in commas):
        number, cell = commas[0]
        raise SetupError(
            f"{path}, line {number}: the comma of {cell} in {column} may stand before decimals or between thousands: "
            f"write {' or '.join(_meant(cell))}, and so in each line"
        )


def _meant(cell: str) -> list[str]:
    """What a number with commas may mean, with `.` before decimals and nothing between thousands."""
    if "." in cell:
        last = max(cell.rfind("."), cell.rfind(","))
        return [re.sub("[.,]", "", cell[:last]) + "." + cell[last + 1 :]]
    whole = [cell.replace(",", "")] if THOUSANDS.fullmatch(cell) or cell.count(",") > 1 else []
    return whole + [cell.replace(",", ".")] * (cell.count(",") == 1)


def _text(path: Path) -> str:
    """
    Raises:
        SetupError: it cannot be read, or is not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SetupError(f"data.labels={path} cannot be read ({error.strerror})") from None
    if data.startswith(b"PK\3\4"):
        raise SetupError(f"data.labels={path} cannot be read: it is a spreadsheet or an archive, save it as CSV")
    if unpack := next((program for begin, program in COMPRESSED.items() if data.startswith(begin)), None):
        raise SetupError(f"data.labels={path} cannot be read: it is compressed, {unpack} it first")
    if data.startswith(UTF_16) or b"\0" in data[:1000]:
        raise SetupError(f"data.labels={path} cannot be read: its text is UTF-16, {SAVE}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SetupError(
            f"data.labels={path} cannot be read: line {line} is not UTF-8 but another encoding, such as Latin-1; {SAVE}"
        ) from None

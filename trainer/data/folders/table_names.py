"""The text of a table of labels, and which column names the images, and how: as paths, with more folders, as ids."""

from __future__ import annotations

import csv
import io
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from trainer.data.folders.scanning import LeftOut, images_below, is_image, listed
from trainer.errors import SetupError

SEPARATORS = "\t", ",", ";", "|"  # between columns: the first that the first line holds; others may be in its cells
NAMED = re.compile(r"sep=(.)\r?\n")  # Excel's line that names it
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+")
NUMBER = re.compile(r"[-+\d.,eE]+")
LOOKED_AT = 100  # rows, to choose a column and a reading
INDEX = ("", "index", "id")  # names of a column that counts the rows, as pandas writes it; or "Unnamed: 0"


class Line(NamedTuple):
    """A line that is not empty."""

    number: int
    cells: list[str]


def read_lines(path: Path) -> tuple[list[str], list[Line], str]:
    """A table's first line, its others that are not empty, and the separator. Raises SetupError."""
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
    return first, lines[1:], separator


def check_commas(path: Path, column: str, cells: Iterable[tuple[int, str]]) -> None:
    """Refuse numbers, each with its line, whose commas may mean thousands or decimals. Raises SetupError."""
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


class Naming(NamedTuple):
    """How a table names its images."""

    column: int  # that names them
    path: Callable[[str], str]  # from a cell to a path below data.root; there may be no such image
    note: str = ""  # for the user; empty for paths below data.root in the first column


def plain(cell: str) -> str:
    """The path that a cell holds, also as Windows and `find .` write it."""
    return os.path.normpath(cell.replace("\\", "/"))


def naming(root: Path, header: Sequence[str], rows: Sequence[Line], columns: Sequence[int]) -> Naming:
    """How the first column names images if it names any as it is; else the way by which most rows name one.

    `columns` are the candidates. Raises SetupError.
    """
    seen = [rows[len(rows) * n // LOOKED_AT] for n in range(LOOKED_AT)] if len(rows) > LOOKED_AT else rows
    best, most = Naming(columns[0], plain), 0
    for way in _ways(root, header, seen, columns):
        right = sum(is_there(root, way.path(row.cells[way.column])) for row in seen)
        if right > most:
            best, most = way, right
        elif right == len(seen) and best.column and way.path is best.path:
            raise SetupError(
                f"both columns {header[best.column]} and {header[way.column]} name images: "
                f"data.image_column={header[best.column]} takes the first"
            )
        if right and best.path is plain and not best.column:  # `missing` reports its other rows
            break
        if most == len(seen) and not best.column:
            break
    return best


def is_there(root: Path, path: str) -> bool:
    """Whether a path below `root` is a file."""
    return os.path.isfile(os.path.join(root, path))


def _ways(root: Path, header: Sequence[str], rows: Sequence[Line], columns: Sequence[int]) -> Iterator[Naming]:
    """Candidates, the likeliest first: paths as they are, without leading folders that all have, ids."""
    notes = [f"column {name or n + 1} names the images" if n else "" for n, name in enumerate(header)]
    yield from (Naming(n, plain, notes[n]) for n in columns)
    starts = [(n, start) for n in columns for start in _starts([plain(row.cells[n]) for row in rows])]
    for n, start in starts:
        yield Naming(n, _without(start), _joined(notes[n], f"{start} is left out before each path"))
    named = by_stem(root)
    for n in columns:
        cell = rows[0].cells[n]
        yield Naming(n, named, _joined(notes[n], f"names have no suffix: {cell} is {named(cell)}"))
    for n, start in starts:
        whole, cell = _composed(_without(start), named), rows[0].cells[n]
        yield Naming(n, whole, _joined(notes[n], f"{cell} is {whole(cell)}"))


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _starts(paths: Sequence[str]) -> Iterator[str]:
    """The folders that all paths begin with: a/, a/b/."""
    folders = [path.split("/")[:-1] for path in paths]
    start = ""
    for first, last in zip(min(folders), max(folders), strict=False):  # what these two have in common, all have
        if first != last:
            return
        start += f"{first}/"
        yield start


def _without(start: str) -> Callable[[str], str]:
    return lambda cell: plain(cell).removeprefix(start)


def _composed(first: Callable[[str], str], second: Callable[[str], str]) -> Callable[[str], str]:
    return lambda cell: second(first(cell))


def by_stem(root: Path) -> Callable[[str], str]:
    """From an id to the path of the only image with that name: 0001 is 0001.jpg."""

    @cache
    def images(folder: str) -> dict[str, list[str]]:
        names = defaultdict(list)
        if os.path.isdir(folder):
            for name in listed(folder, LeftOut(empty=False))[1]:
                names[os.path.splitext(name)[0]].append(name)
        return names

    def path(cell: str) -> str:
        folder, stem = os.path.split(plain(cell))
        names = images(os.path.join(root, folder)).get(stem, [])
        return os.path.join(folder, names[0]) if len(names) == 1 and not is_image(stem) else plain(cell)

    return path


def counts_rows(cells: Sequence[str]) -> bool:
    """Whether a column counts the rows, from 0 or 1."""
    return any(cells == [str(first + n) for n in range(len(cells))] for first in (0, 1))


def is_index(name: str) -> bool:
    """Whether a column is called as one that counts the rows."""
    return name.lower() in INDEX or name.lower().startswith("unnamed")


def unlisted(root: Path, files: Collection[str]) -> str:
    """A note about images that a table does not name, in folders of which it names some; empty where there are none."""
    named, beside = set(files), 0
    for folder in {os.path.dirname(file) for file in files}:
        images = listed(root / folder, LeftOut(empty=False))[1]
        beside += sum(os.path.join(folder, name) not in named for name in images)
    return f"{beside:,} image{'s' * (beside > 1)} beside these in no line, and left out" if beside else ""


def missing(path: Path, root: Path, rows: Sequence[Line], lost: Sequence[Line], naming: Naming) -> SetupError:
    """The error for a table of which some rows, the `lost`, name images that are not there."""
    number, cells = lost[0]
    start = f"{path}, line {number}: {os.path.join(root, naming.path(cells[naming.column]))} is not there"
    more = f" ({len(lost)} of {len(rows)} rows name images that are not)" if len(lost) > 1 else ""
    example = next(images_below(str(root), LeftOut()), None)
    if example is None:
        return SetupError(f"{start}: {root} holds no images that can be read here")
    return SetupError(
        f"{start}{more}: change its path, or remove the line; images are named by their paths below data.root={root}, "
        f"such as {example}"
    )

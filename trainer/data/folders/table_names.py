"""Which column of a table of labels names the images, and how: as paths below data.root, with more folders, as ids."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from trainer.data.folders.scanning import LeftOut, images_below, is_image, listed
from trainer.data.folders.table_text import Line
from trainer.errors import SetupError

LOOKED_AT = 100  # rows, to choose a column and a reading
INDEX = ("", "index", "id")  # names of a column that counts the rows, as pandas writes it; or "Unnamed: 0"


class Naming(NamedTuple):
    """How a table names its images.

    Attributes:
        column: that names them.
        path: from a cell to a path below data.root; there may be no such image.
        note: for the user; empty for paths below data.root in the first column.
    """

    column: int
    path: Callable[[str], str]
    note: str = ""


def plain(cell: str) -> str:
    """The path that a cell holds, also as Windows and `find .` write it."""
    return os.path.normpath(cell.replace("\\", "/"))


def naming(root: Path, header: Sequence[str], rows: Sequence[Line], columns: Sequence[int]) -> Naming:
    """How the first column names images if it names any as it is; else the way by which most rows name one.

    `columns` are the candidates.

    Raises:
        SetupError: two columns name images, and neither is the first.
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

"""Which column of a table of labels names the images, and how: below data.root, with folders before it, as ids."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from trainer.data.folders.scanning import LeftOut, few, images_below, is_image, listed
from trainer.data.folders.table_text import Line
from trainer.errors import SetupError

LOOKED_AT = 100  # rows, to choose a column and a reading
INDEX = ("", "index", "id")  # how a column is called that counts the rows, as pandas writes it; or "Unnamed: 0"
PARENTS = 3  # folders above data.root that are looked into, to say which was meant


class Naming(NamedTuple):
    """How a table names its images.

    Attributes:
        column: that names them.
        path: the path below data.root that a cell of it means; there may be no such image.
        told: what to say of it; empty for paths below data.root in the first column.
    """

    column: int
    path: Callable[[str], str]
    told: str = ""


def plain(cell: str) -> str:
    """The path that a cell holds, also as Windows and `find .` write it."""
    return os.path.normpath(cell.replace("\\", "/"))


def naming(root: Path, header: Sequence[str], rows: Sequence[Line], columns: Sequence[int]) -> Naming:
    """The first column as it stands where it names any images; else by what reading most rows looked at name some.

    `columns` are those that may.

    Raises:
        SetupError: two columns name images, and neither is the first.
    """
    seen = [rows[len(rows) * n // LOOKED_AT] for n in range(LOOKED_AT)] if len(rows) > LOOKED_AT else rows
    best, most = Naming(columns[0], plain), 0
    for found in _ways(root, header, seen, columns):
        right = sum(is_there(root, found.path(row.cells[found.column])) for row in seen)
        if right > most:
            best, most = found, right
        elif right == len(seen) and best.column and found.path is best.path:
            raise SetupError(
                f"both columns {header[best.column]} and {header[found.column]} name images: "
                f"data.image_column={header[best.column]} takes the first"
            )
        if right and best.path is plain and not best.column:  # other rows of it are missing, and will be told
            break
        if most == len(seen) and not best.column:
            break
    return best


def is_there(root: Path, path: str) -> bool:
    """Whether a path below `root` is a file."""
    return os.path.isfile(os.path.join(root, path))


def _ways(root: Path, header: Sequence[str], rows: Sequence[Line], columns: Sequence[int]) -> Iterator[Naming]:
    """All that is tried, the likeliest first: as it stands, without leading folders that all share, as ids."""
    told = [f"column {name or n + 1} names the images" if n else "" for n, name in enumerate(header)]
    yield from (Naming(n, plain, told[n]) for n in columns)
    starts = [(n, start) for n in columns for start in _starts([plain(row.cells[n]) for row in rows])]
    for n, start in starts:
        yield Naming(n, _without(start), _joined(told[n], f"{start} is left out before each path"))
    named = by_stem(root)
    for n in columns:
        cell = rows[0].cells[n]
        yield Naming(n, named, _joined(told[n], f"names have no suffix: {cell} is {named(cell)}"))
    for n, start in starts:
        whole, cell = _one_after_the_other(_without(start), named), rows[0].cells[n]
        yield Naming(n, whole, _joined(told[n], f"{cell} is {whole(cell)}"))


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _starts(paths: Sequence[str]) -> Iterator[str]:
    """The folders that all paths lie in, the outermost first: a/, a/b/."""
    folders = [path.split("/")[:-1] for path in paths]
    start = ""
    for first, last in zip(min(folders), max(folders), strict=False):  # what these two share, all share
        if first != last:
            return
        start += f"{first}/"
        yield start


def _without(start: str) -> Callable[[str], str]:
    return lambda cell: plain(cell).removeprefix(start)


def _one_after_the_other(first: Callable[[str], str], second: Callable[[str], str]) -> Callable[[str], str]:
    return lambda cell: second(first(cell))


def by_stem(root: Path) -> Callable[[str], str]:
    """Of an id the path of the one image that is called so: 0001 is 0001.jpg."""

    @cache
    def images(folder: str) -> dict[str, list[str]]:
        found = defaultdict(list)
        if os.path.isdir(folder):
            for name in listed(folder, LeftOut(empty=False))[1]:
                found[os.path.splitext(name)[0]].append(name)
        return found

    def path(cell: str) -> str:
        folder, stem = os.path.split(plain(cell))
        found = images(os.path.join(root, folder)).get(stem, [])
        return os.path.join(folder, found[0]) if len(found) == 1 and not is_image(stem) else plain(cell)

    return path


def counts_rows(cells: Sequence[str]) -> bool:
    """Whether a column counts the rows, from 0 or 1."""
    return any(cells == [str(first + n) for n in range(len(cells))] for first in (0, 1))


def is_index(name: str) -> bool:
    """Whether a column is called as one that counts the rows."""
    return name.lower() in INDEX or name.lower().startswith("unnamed")


def not_named(root: Path, files: Collection[str]) -> str:
    """What to say of images beside those that a table names; empty where there are none.

    Folders of which it names none are another matter, as competitions' test images are.
    """
    named, beside = set(files), 0
    for folder in {os.path.dirname(file) for file in files}:
        images = listed(root / folder, LeftOut(empty=False))[1]
        beside += sum(os.path.join(folder, name) not in named for name in images)
    return f"{beside:,} image{'s' * (beside > 1)} beside these in no line, and left out" if beside else ""


def missing(path: Path, root: Path, rows: Sequence[Line], lost: Sequence[Line], found: Naming) -> SetupError:
    """The error for a table of whose rows some, the `lost`, name images that are not there."""
    number, cells = lost[0]
    cell = found.path(cells[found.column])
    start = f"{path}, line {number}: {os.path.join(root, cell)} is not there"
    more = f" ({len(lost)} of {len(rows)} rows name images that are not)" if len(lost) > 1 else ""
    if len(lost) == len(rows):
        above = (Path(os.path.normpath(root / "/".join([".."] * count))) for count in range(1, PARENTS + 1))
        folders = (*(root / name for name in listed(root, LeftOut())[0]), *above)
        for folder, column in product(folders, range(len(cells))):
            if all(is_there(folder, plain(row.cells[column])) for row in rows[:LOOKED_AT]):
                words = quote(f"data.root={folder}"), quote(f"data.labels={path}")
                there = folder / plain(cells[column])
                return SetupError(f"{start}, and {there} is: type {words[0]} {words[1]}")
    folder, name = root / os.path.dirname(cell), os.path.basename(cell)
    if folder.is_dir():
        stem = os.path.splitext(name)[0].lower()
        alike = [one for one in listed(folder, LeftOut())[1] if os.path.splitext(one)[0].lower() == stem]
        if alike:
            return SetupError(f"{start}, and {few(alike)} {'are' if len(alike) > 1 else 'is'}{more}: write that there")
    example = next(images_below(str(root), LeftOut()), None)
    if example is None:
        return SetupError(f"{start}: {root} holds no images that can be read here")
    return SetupError(
        f"{start}{more}: change its path, or remove the line; images are named by their paths below data.root={root}, "
        f"such as {example}"
    )

"""Labels of a folder's images in a table: data.labels=FILE.csv."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer import tasks
from trainer.data.class_names import class_names
from trainer.data.folders.layout import Before, held_out_of, part_named
from trainer.data.folders.photo_folders import PhotoFolder, divided, photos
from trainer.data.folders.scanning import LeftOut, few, images_below, listed
from trainer.data.sets import Datasets
from trainer.errors import SetupError
from trainer.recipe import DataRecipe, Recipe
from trainer.tasks.task import Reads

SPLIT = "split"  # the column that says which set an image is in
COLUMNS = ("\t", ",", ";")  # marks between columns: the first that the header holds; others may be in its cells
SEPARATOR = ";"  # between the classes of an image
BINARY = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}  # as pandas and R write them
DIGITS = 10  # up to so many classes may have numbers as names

Line = tuple[int, list[str]]  # its number and its cells

WANTED = {
    "class": "a column with each image's class",
    "classes": "a column with each image's classes, as cat;dog, or a column of 0 and 1 for each class",
    "values": "a column of numbers for each value",
}


class Row(NamedTuple):
    """A line of the table."""

    number: int
    file: str
    cells: tuple[str, ...]


class Table:
    """A CSV with a header: a column with an image's path below data.root, the first unless the recipe says another;
    `split` may say which set it is in; the others are its labels. Raises SetupError.

    Attributes:
        columns: the names of the others.
        train, val: its rows; where it is not `divided`, all of them train and none is held out.
        others: rows of a test part that is not held out.
        notes: what is left out of it.
    """

    def __init__(self, path: Path, root: Path, reads: Reads, data: DataRecipe, test: bool) -> None:
        """`test`: hold out that part."""
        self.path = path
        header, lines = read_lines(path)
        (image,) = self._columns(header, "image_column", data.image_column or header[0])
        wanted = self._columns(header, "label_column", data.label_column)
        taken = (image, *wanted)
        split = next((n for n, name in enumerate(header) if name.lower() == SPLIT and n not in taken), None)
        labels = wanted or [n for n in range(len(header)) if n not in (split, image)]
        if image and not wanted and len(labels) > 1:
            names = few([header[n] for n in labels], 6)
            raise SetupError(
                f"{path}: data.image_column={header[image]} is not the first column, and of {names} some may be no "
                f"labels: add data.label_column={header[labels[-1]]}, or [A,B] for several"
            )
        self.columns = tuple(header[n] for n in labels)
        self._check_paths(root, header, lines, image)
        rows = self._rows(lines, image, split, labels, reads)
        again = len(lines) - len(rows)
        notes = [f"{again} repeated line{'s' * (again > 1)} left out"] if again else []
        if beside := unlisted(root, {row.file for _, row in rows}):
            notes.append(f"{beside:,} image{'s' * (beside > 1)} beside these in no line, and left out")
        self.notes = {"labels": "; ".join(notes)} if notes else {}
        self.divided = split is not None or any(part for part, _ in rows)
        self._divide(rows, test)

    def _columns(self, header: Sequence[str], key: str, names: str | Sequence[str] | None) -> list[int]:
        """The places of the columns that a key of the recipe names."""
        columns = []
        for name in [names] if isinstance(names, str) else names or []:
            if name not in header:
                raise SetupError(f"data.{key}={name} is no column of {self.path}; its columns are {few(header, 6)}")
            columns.append(header.index(name))
        return columns

    def _check_paths(self, root: Path, header: Sequence[str], lines: Sequence[Line], image: int) -> None:
        """Refuse a table of which a row, or the header, names another thing than is meant."""
        if (root / plain(header[image])).is_file():
            raise SetupError(f"{self.path}, line 1 names an image: put a header above it, such as file,label")
        lost = [(number, cells) for number, cells in lines if not (root / plain(cells[image])).is_file()]
        if not lost:
            return
        number, cells = lost[0]
        more = f" ({len(lost)} of {len(lines)} rows name images that are not)" if len(lost) > 1 else ""
        start = f"{self.path}, line {number}: {root / plain(cells[image])} is not there{more}"
        example = next(images_below(str(root), LeftOut()), None)
        if example is None:
            raise SetupError(f"{start}: {root} holds no images that can be read here")
        raise SetupError(
            f"{start}: column {header[image]} has whole paths below data.root={root}, such as {example}: correct or "
            "remove the line, or type data.image_column= of another column"
        )

    def _rows(
        self, lines: Sequence[Line], image: int, split: int | None, labels: Sequence[int], reads: Reads
    ) -> list[tuple[str | None, Row]]:
        """Its rows, each with the part that it is in; only training images may have several rows."""
        known: dict[str, tuple[str | None, Row]] = {}
        rows: list[tuple[str | None, Row]] = []
        for number, cells in lines:
            file = plain(cells[image])
            part = part_named(cells[split] if split is not None else file.partition("/")[0])
            row = Row(number, file, tuple(cells[n] for n in labels))
            before, first = known.setdefault(file, (part, row))
            if (before, first.cells) != (part, row.cells):
                other = few(first.cells) if first.cells != row.cells else before or "no part"
                advice = "write its classes in one line, as cat;dog" if reads == "classes" else "keep one of them"
                raise SetupError(
                    f"{self.path}, line {number}: {file} is there already (line {first.number}), as {other}: {advice}"
                )
            if first is row or part == "train":  # where a table does not divide them, copies might get into both parts
                rows.append((part, row))
        return rows

    def _divide(self, rows: Sequence[tuple[str | None, Row]], test: bool) -> None:
        parts: dict[str, list[Row]] = {}
        for part, row in rows:
            if part is None and self.divided:
                raise SetupError(
                    f"{self.path}, line {row.number}: nothing says whether {row.file} is for training: put it below "
                    "train/ or val/, or add a column `split` with train or val"
                )
            parts.setdefault(part or "train", []).append(row)
        held_out, told = held_out_of(parts, test, self.path)
        self.train, self.val = parts.pop("train", []), parts.pop(held_out or "", [])
        self.others = parts.pop("test", [])
        self.notes |= told
        if self.others:
            self.notes["beside"] = f"not looked at in {self.path}: {len(self.others):,} rows of {SPLIT} test"
        for part_rows, name in ((self.train, "train"), (self.val, "val")):
            if not part_rows and self.divided:
                raise SetupError(f"{self.path} has no row of {SPLIT} {name}; both sets need images")

    def read(self, reads: Reads) -> tuple[tuple[str, ...], list[npt.NDArray[Any]]]:
        """The names of classes or values, and the targets of the training and the held-out rows."""
        parts = (self.train, self.val)
        if reads == "class" and len(self.columns) == 1:
            named = class_names((row.cells[0] for row in self.train), (row.cells[0] for row in self.val))
            self.notes |= named.notes
            self._check_classes(named.names)
            return tuple(named.names), [
                np.array([self._place(row, row.cells[0], named.places) for row in rows], np.int64) for rows in parts
            ]
        cells = [row.cells[0] for row in (*self.train, *self.val)]
        if reads == "classes" and len(self.columns) == 1 and not {*BINARY} >= {*map(str.lower, cells)}:
            if other := next((cell for cell in cells for mark in "|," if mark in cell), None):
                raise SetupError(
                    f"{self.path}: '{other}': write {SEPARATOR} between classes, or a column of 0 and 1 each"
                )
            cells += [row.cells[0] for row in self.others]  # the same classes, whichever part is held out
            named = class_names(name for cell in cells for name in _several(cell))
            self.notes |= named.notes
            matrices = [np.zeros((len(rows), len(named.names)), np.float32) for rows in parts]
            for rows, targets in zip(parts, matrices, strict=True):
                for n, row in enumerate(rows):
                    targets[n, [named.places[name] for name in _several(row.cells[0])]] = 1
            return tuple(named.names), matrices
        if reads in ("classes", "values") and self.columns:
            return self.columns, [self._matrix(rows) for rows in parts]
        columns = f"its other columns are {few(self.columns, 6)}: data.label_column=NAME takes one"
        raise SetupError(f"{self.path} needs {WANTED[reads]}; {columns}")

    def _check_classes(self, names: Sequence[str]) -> None:
        """Refuse several classes in a cell, and numbers of which hardly any comes twice: those are values to be
        predicted, not classes."""
        if several := next((name for name in names if SEPARATOR in name), None):
            raise SetupError(f"{self.path}: '{several}' looks like several classes: add task.name=multilabel")
        measures = all(map(_is_number, names)) and (len(names) > DIGITS or not all(map(str.isdigit, names)))
        if measures and len(names) > len(self.train) / 2:
            raise SetupError(
                f"{self.path}: {self.columns[0]} holds {len(names)} different numbers for {len(self.train)} images, "
                f"such as {names[-1]}: where they are measures and no classes, add task.name=regression; "
                f"where they are classes, write them as words, such as class-{names[-1]}"
            )

    def _place(self, row: Row, name: str, places: Mapping[str, int]) -> int:
        if name in places and name:
            return places[name]
        what = f"no training image has the class '{name}'" if name else f"{row.file} has no class"
        raise SetupError(f"{self.path}, line {row.number}: {what}")

    def _matrix(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        return np.array([self._numbers(row) for row in rows], np.float32).reshape(len(rows), len(self.columns))

    def _numbers(self, row: Row) -> list[float]:
        try:
            numbers = [BINARY[cell.lower()] if cell.lower() in BINARY else float(cell) for cell in row.cells]
        except ValueError:
            numbers = [math.nan]
        if not all(map(math.isfinite, numbers)):
            raise SetupError(
                f"{self.path}, line {row.number}: {few(row.cells)} are not all numbers: write a dot before decimals "
                "and nothing between thousands, or choose columns, data.label_column=[A,B]"
            )
        return numbers


def read_lines(path: Path) -> tuple[list[str], list[Line]]:
    """A table's header, and its lines that are not empty with their numbers. Raises SetupError."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if "\0" in text[:1000]:
            raise ValueError("it holds zero bytes")
        start = text.lstrip("\r\n").partition("\n")[0]
        mark = next((mark for mark in COLUMNS if mark in start), ",")
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark, skipinitialspace=True)
        lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    except OSError as error:
        raise SetupError(f"data.labels={path} cannot be read ({error.strerror})") from None
    except (ValueError, csv.Error) as error:
        raise SetupError(
            f"data.labels={path} cannot be read ({error}): save it as UTF-8 (Excel: Save As, CSV UTF-8)"
        ) from None
    if len(lines) < 2 or len(lines[0][1]) < 2:
        raise SetupError(
            f"data.labels={path} needs a header and rows with commas between their cells, such as file,label and "
            "train/cat-1.jpg,cat below it"
        )
    header = lines[0][1]
    for number, cells in lines[1:]:
        if len(cells) != len(header):
            what = f"{len(cells)} cells with '{mark}' between them, and the header has {len(header)}"
            raise SetupError(f"{path}, line {number}: {what}")
    return header, lines[1:]


def plain(cell: str) -> str:
    """The path that a cell holds, also as Windows and `find .` write it."""
    return os.path.normpath(cell.replace("\\", "/"))


def unlisted(root: Path, files: Collection[str]) -> int:
    """How many images a table does not name, in folders of which it names some."""
    beside = 0
    for folder in {os.path.dirname(file) for file in files}:
        images = listed(root / folder, LeftOut(empty=False))[1]
        beside += sum(os.path.join(folder, name) not in files for name in images)
    return beside


def open_table(recipe: Recipe, before: Before) -> Datasets:
    """The images of `data.root` that the table `data.labels` names, with their targets. Raises SetupError."""
    if recipe.data.root is None:
        raise SetupError(f"data.labels={recipe.data.labels} needs the images' folder: type data.root=FOLDER")
    root = Path(recipe.data.root).expanduser()
    wanted = Path(str(recipe.data.labels)).expanduser()
    path = wanted if wanted.is_absolute() or not (root / wanted).is_file() else root / wanted
    reads = tasks.kind(recipe).reads
    table = Table(path, root, reads, recipe.data, before.test)
    names, targets = table.read(reads)
    train, val = (
        PhotoFolder(root, [row.file for row in rows], labels)
        for rows, labels in zip((table.train, table.val), targets, strict=True)
    )
    split = f"the held-out rows of {path}"
    if not table.divided:
        train, val, split = divided(train, recipe, before)
    return photos(recipe, train, val, names, split, table.notes, drawn=not table.divided)


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def _several(cell: str) -> list[str]:
    return [name.strip() for name in cell.split(SEPARATOR) if name.strip()]

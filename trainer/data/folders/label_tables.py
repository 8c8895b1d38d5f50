"""Labels of a folder's images in a table: data.labels=FILE.csv."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer import tasks
from trainer.data.class_names import class_names
from trainer.data.folders.layout import Before, held_out_of, part_named
from trainer.data.folders.photo_folders import PhotoFolder, divided, photos
from trainer.data.folders.scanning import few
from trainer.data.folders.table_names import (
    Line,
    Naming,
    check_commas,
    counts_rows,
    is_index,
    is_there,
    missing,
    naming,
    read_lines,
    unlisted,
)
from trainer.data.items import TARGETS
from trainer.data.sets import Datasets
from trainer.errors import SetupError
from trainer.recipe import DataRecipe, Recipe
from trainer.tasks.task import Reads

SPLIT = "split"  # the column that says which set an image is in
SEPARATOR = ";"  # between the classes of an image
OTHERS = {"|": "|", ",": "a comma", " ": "a blank"}  # in other programs' tables
BINARY = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}  # as pandas and R write them
DIGITS = 10  # up to so many classes may have numbers as names

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
    """A CSV with a header: one column is an image's path below data.root, `split` may say which set it is in. Raises
    SetupError.

    Attributes:
        columns: the names of the others.
        train, val: its rows; where it is not `divided`, all of them train and none is held out.
        others: rows of a test part that is not held out.
        notes: how it was read, where it is not as the guide describes it.
    """

    def __init__(self, path: Path, root: Path, reads: Reads, data: DataRecipe, test: bool) -> None:
        """`test`: hold out that part."""
        self.path = path
        header, lines, separator = read_lines(path)
        self._decimals = separator != ","  # a comma may then stand before decimals: 1,72
        image = self._columns(header, "image_column", data.image_column)
        self._wanted = self._columns(header, "label_column", data.label_column)
        named = naming(root, header, lines, image or range(len(header)))
        notes = [named.note] if named.note else []
        if is_there(root, named.path(header[named.column])):
            notes.append("there is no header, line 1 names an image too")
            lines = [Line(1, header), *lines]
            header = [f"column {n + 1}" for n in range(len(header))]
        taken = (named.column, *self._wanted)
        split = next((n for n, name in enumerate(header) if name.lower() == SPLIT and n not in taken), None)
        labels = self._wanted or [n for n in range(len(header)) if n not in (split, named.column)]
        may_count = not self._wanted and named.column and len(labels) > 1 and (reads == "class" or is_index(header[0]))
        if may_count and split != 0 and counts_rows([line.cells[0] for line in lines]):
            labels.remove(0)
        if lines[0].number == 1 and reads != "class" and (reads == "values" or len(labels) > 1):
            raise SetupError(
                f"{path}, line 1 names an image: put a header above it, such as file,{','.join('abc'[: len(labels)])}, "
                "with the names of classes or values"
            )
        self.columns = tuple(header[n] for n in labels)
        lost = [line for line in lines if not is_there(root, named.path(line.cells[named.column]))]
        if lost:
            raise missing(path, root, lines, lost, named)
        rows = self._rows(lines, named, split, labels, reads)
        again = len(lines) - len(rows)
        if again:
            notes.append(f"{again} repeated line{'s' * (again > 1)} left out")
        if others := unlisted(root, {row.file for _, row in rows}):
            notes.append(others)
        self.notes = {"labels": "; ".join(notes)} if notes else {}
        self.divided = split is not None or any(part for part, _ in rows)
        self._divide(rows, test)

    def _columns(self, header: Sequence[str], key: str, names: str | Sequence[str] | None) -> list[int]:
        """The places of the columns that a key of the recipe names."""
        known = [name.lower() for name in header]
        columns = []
        for name in [names] if isinstance(names, str) else names or []:
            if name.lower() not in known:
                raise SetupError(f"data.{key}={name} is no column of {self.path}; its columns are {few(header, 6)}")
            columns.append(header.index(name) if name in header else known.index(name.lower()))
        return columns

    def _rows(
        self, lines: Sequence[Line], named: Naming, split: int | None, labels: Sequence[int], reads: Reads
    ) -> list[tuple[str | None, Row]]:
        """Its rows, each with the part that it is in; only training images may have several rows."""
        known: dict[str, tuple[str | None, Row]] = {}
        rows: list[tuple[str | None, Row]] = []
        for number, cells in lines:
            image = named.path(cells[named.column])
            part = part_named(cells[split] if split is not None else image.partition("/")[0])
            row = Row(number, image, tuple(cells[n] for n in labels))
            before, first = known.setdefault(image, (part, row))
            if (before, first.cells) != (part, row.cells):
                other = few(first.cells) if first.cells != row.cells else before or "no part"
                advice = "write its classes in one line, as cat;dog" if reads == "classes" else "keep one of them"
                raise SetupError(
                    f"{self.path}, line {number}: {image} is there already (line {first.number}), as {other}: {advice}"
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
            names, self.notes = named.names, self.notes | named.notes
            self._check_classes(names)
            if SEPARATOR in "".join(names) and _shared(names, SEPARATOR):
                several = next(name for name in names if SEPARATOR in name)
                raise SetupError(f"{self.path}: '{several}' looks like several classes: add task.name=multilabel")
            return tuple(names), [
                np.array([self._place(row, row.cells[0], named.places) for row in rows], np.int64) for rows in parts
            ]
        cells = [row.cells[0] for row in (*self.train, *self.val)]
        if reads == "classes" and len(self.columns) == 1 and not {*BINARY} >= {*map(str.lower, cells)}:
            self._check_separator(cells)
            cells += [row.cells[0] for row in self.others]  # the same classes, whichever part is held out
            named = class_names(name for cell in cells for name in _several(cell))
            names, self.notes = named.names, self.notes | named.notes
            matrices = [np.zeros((len(rows), len(names)), np.float32) for rows in parts]
            for rows, targets in zip(parts, matrices, strict=True):
                for n, row in enumerate(rows):
                    for name in _several(row.cells[0]):
                        targets[n, named.places[name]] = 1
            return tuple(names), matrices
        if reads in ("classes", "values") and self.columns:
            for n, column in enumerate(self.columns if self._decimals else ()):
                check_commas(self.path, column, ((row.number, row.cells[n]) for rows in parts for row in rows))
            return self.columns, [self._matrix(rows) for rows in parts]
        likely = next((name for name in self.columns if name.lower() in TARGETS), (*self.columns, "")[0])
        choose = f": data.label_column={likely} takes that" if likely else ""
        raise SetupError(f"{self.path} needs {WANTED[reads]}; its other columns are {few(self.columns, 6)}{choose}")

    def _check_separator(self, cells: Sequence[str]) -> None:
        """Refuse cells in which another mark than `;` separates the classes of an image."""
        names = {cell for cell in cells if cell}
        for mark, words in OTHERS.items():
            first = next((cell for cell in cells if mark in cell), None)
            if first is None or any(SEPARATOR in cell for cell in cells):
                continue
            parts = {part for name in names for part in name.split(mark)}
            if mark == "|" or (mark == "," and _shared(names, mark)) or len(parts) < len(names):
                meant = SEPARATOR.join(part.strip() for part in first.split(mark) if part.strip())
                raise SetupError(
                    f"{self.path}: '{first}' looks like several classes with {words} between them: write {meant}, or "
                    "a column of 0 and 1 for each class"
                )

    def _check_classes(self, names: Sequence[str]) -> None:
        """Refuse numbers of which hardly any comes twice: they are values to be predicted, not classes."""
        measures = all(map(_is_number, names)) and (len(names) > DIGITS or not all(map(str.isdigit, names)))
        if measures and len(names) > len(self.train) / 2:
            raise SetupError(
                f"{self.path}: {self.columns[0]} holds {len(names)} different numbers for {len(self.train)} images, "
                f"such as {names[-1]}: where they are measures and no classes, add task.name=regression; "
                f"where they are classes, write them as words, such as class-{names[-1]}"
            )

    def _place(self, row: Row, name: str, places: Mapping[str, int]) -> int:
        if not name:
            raise SetupError(f"{self.path}, line {row.number}: {row.file} has no class")
        if name not in places:
            raise SetupError(f"{self.path}, line {row.number}: no training image has the class '{name}'")
        return places[name]

    def _matrix(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        return np.array([self._numbers(row) for row in rows], np.float32).reshape(len(rows), len(self.columns))

    def _numbers(self, row: Row) -> list[float]:
        try:
            cells = [cell.replace(",", ".") if self._decimals else cell for cell in row.cells]
            numbers = [BINARY[cell.lower()] if cell.lower() in BINARY else float(cell) for cell in cells]
        except ValueError:
            numbers = [math.nan]
        if not all(map(math.isfinite, numbers)):
            some = len(row.cells) > 1 and not self._wanted
            choose = f"; data.label_column=[{','.join(self.columns[:2])}] takes only these columns" if some else ""
            raise SetupError(f"{self.path}, line {row.number}: {few(row.cells)} are not all numbers{choose}")
        return numbers


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


def _shared(names: Iterable[str], mark: str) -> bool:
    """Whether a part of a name, between `mark`s, occurs in several names."""
    parts = Counter(part.strip() for name in names for part in {*name.split(mark)} if part.strip())
    return max(parts.values(), default=0) > 1


def _several(cell: str) -> list[str]:
    return [name.strip() for name in cell.split(SEPARATOR) if name.strip()]

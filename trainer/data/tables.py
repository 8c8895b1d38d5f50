"""Labels of a folder's images in a table: data.labels=FILE.csv."""

from __future__ import annotations

import csv
import math
import os
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer import tasks
from trainer.data.folders import PhotoFolder, divided, photos
from trainer.data.layout import HELD_OUT, TRAIN
from trainer.data.sets import Datasets
from trainer.data.splits import Before
from trainer.errors import SetupError
from trainer.recipe import Recipe
from trainer.tasks.base import Reads

SPLIT = "split"  # the column that says which set an image is in
SEPARATOR = ";"  # between the classes of an image

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
    """A CSV with a header: the first column is an image's path below data.root, `split` may say which set it is in.

    Attributes:
        columns: what it tells of each image.
        train, val: its rows; where it is not `divided`, all of them train and none is held out.

    Raises:
        SetupError: it cannot be read, or is no such table; the line says where.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.reader(file)
                lines = [(reader.line_num, row) for row in reader if any(row)]
        except (OSError, UnicodeError, csv.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise SetupError(f"data.labels={path} cannot be read ({reason})") from None
        if len(lines) > 1 and len(lines[0][1]) == 1 and ";" in lines[0][1][0]:
            raise SetupError(f"data.labels={path} has semicolons between its columns: commas are needed there")
        if len(lines) < 2 or len(lines[0][1]) < 2:
            raise SetupError(
                f"data.labels={path} needs a header and rows, such as file,label and train/cat-1.jpg,cat below it"
            )
        header = [name.strip() for name in lines[0][1]]
        split = next((n for n, name in enumerate(header) if name.lower() == SPLIT and n), None)
        told = [n for n in range(1, len(header)) if n != split]
        self.columns = tuple(header[n] for n in told)
        self.train: list[Row] = []
        self.val: list[Row] = []
        rows: list[tuple[str, Row]] = []
        for number, cells in lines[1:]:
            if len(cells) != len(header):
                raise SetupError(f"{path}, line {number}: {len(cells)} cells, and the header has {len(header)}")
            image = os.path.normpath(cells[0].strip().replace("\\", "/"))
            part = cells[split] if split is not None else image.partition("/")[0]
            rows.append((part.strip().lower(), Row(number, image, tuple(cells[n].strip() for n in told))))
        self.divided = split is not None or any(part in (*TRAIN, *HELD_OUT) for part, _ in rows)
        for part, row in rows:
            if part in TRAIN or not self.divided:
                self.train.append(row)
            elif part in HELD_OUT:
                self.val.append(row)
            else:
                raise SetupError(
                    f"{path}, line {row.number}: nothing says whether {row.file} is for training: put it below train/ "
                    "or val/, or add a column `split` with train or val"
                )
        for found, name in ((self.train, "train"), (self.val, "val")):
            if not found and self.divided:
                raise SetupError(f"{path} has no row of {SPLIT} {name}; both sets need images")

    def read(self, reads: Reads) -> tuple[tuple[str, ...], list[npt.NDArray[Any]]]:
        """The names of classes or values, and the targets of the training and the held-out rows."""
        parts = (self.train, self.val)
        if reads == "class" and len(self.columns) == 1:
            names = sorted({row.cells[0] for row in self.train})
            return tuple(names), [
                np.array([self._place(row, row.cells[0], names) for row in rows], np.int64) for rows in parts
            ]
        cells = [row.cells[0] for row in (*self.train, *self.val)]
        if reads == "classes" and len(self.columns) == 1 and not {"0", "1"} >= set(cells):
            names = sorted({name for cell in cells for name in _several(cell)})
            found = [np.zeros((len(rows), len(names)), np.float32) for rows in parts]
            for rows, targets in zip(parts, found, strict=True):
                for n, row in enumerate(rows):
                    for name in _several(row.cells[0]):
                        targets[n, self._place(row, name, names)] = 1
            return tuple(names), found
        if reads in ("classes", "values") and self.columns:
            return self.columns, [self._matrix(rows) for rows in parts]
        raise SetupError(f"{self.path} needs {WANTED[reads]}; beside the first its columns are {_listed(self.columns)}")

    def _place(self, row: Row, name: str, names: list[str]) -> int:
        if not name:
            raise SetupError(f"{self.path}, line {row.number}: {row.file} has no class")
        place = bisect_left(names, name)
        if names[place : place + 1] != [name]:
            raise SetupError(f"{self.path}, line {row.number}: no training image has the class '{name}'")
        return place

    def _matrix(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        return np.array([self._numbers(row) for row in rows], np.float32).reshape(len(rows), len(self.columns))

    def _numbers(self, row: Row) -> list[float]:
        try:
            found = [float(cell) for cell in row.cells]
        except ValueError:
            found = [math.nan]
        if not all(map(math.isfinite, found)):
            raise SetupError(f"{self.path}, line {row.number}: {_listed(row.cells)} are not all numbers")
        return found


def open_table(recipe: Recipe, before: Before) -> Datasets:
    """The images of `data.root` that the table `data.labels` names, with the targets that it tells.

    Raises:
        SetupError: something is missing or makes no sense; the line says what and where.
    """
    if recipe.data.root is None:
        raise SetupError(f"data.labels={recipe.data.labels} needs the images' folder: type data.root=FOLDER")
    root = Path(recipe.data.root).expanduser()
    wanted = Path(str(recipe.data.labels)).expanduser()
    path = wanted if wanted.is_absolute() or not (root / wanted).is_file() else root / wanted
    table = Table(path)
    names, targets = table.read(tasks.kind(recipe).reads)
    for row in (*table.train, *table.val):
        if not os.path.isfile(root / row.file):
            raise SetupError(f"{path}, line {row.number}: {root / row.file} is not there")
    train, val = (
        PhotoFolder(root, [row.file for row in rows], labels)
        for rows, labels in zip((table.train, table.val), targets, strict=True)
    )
    split = f"the held-out rows of {path}"
    if not table.divided:
        train, val, split = divided(train, recipe, before)
    return photos(recipe, train, val, names, split, {}, made=not table.divided)


def _several(cell: str) -> list[str]:
    return [name.strip() for name in cell.split(SEPARATOR) if name.strip()]


def _listed(cells: Sequence[str]) -> str:
    return ", ".join(cells[:6]) + ", ..." * (len(cells) > 6)

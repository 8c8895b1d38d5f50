"""Labels of a folder's images in a table: data.labels=FILE.csv."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer import tasks
from trainer.data.folders.layout import Before, class_names, held_out_of, part_named
from trainer.data.folders.photo_folders import PhotoFolder, divided, photos
from trainer.data.folders.scanning import few
from trainer.data.sets import Datasets
from trainer.errors import SetupError
from trainer.recipe import DataRecipe, Recipe
from trainer.tasks.task import Reads

SPLIT = "split"  # the column that says which set an image is in
SEPARATOR = ";"  # between the classes of an image
DIGITS = 10  # up to so many classes may have whole numbers as names, however few images there are
BINARY = {"true": "1", "false": "0", "1": "1", "0": "0", "1.0": "1", "0.0": "0"}  # as pandas and R write them

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
    part: str | None  # train, val or test
    cells: tuple[str, ...]  # its labels


def open_table(recipe: Recipe, before: Before) -> Datasets:
    """The images of `data.root` that the table `data.labels` names, with their targets. Raises SetupError.

    The table is a CSV with a header: a column with an image's path below data.root, the first unless the recipe says
    another; `split` may say which set it is in; the others are its labels.
    """
    if recipe.data.root is None:
        raise SetupError(f"data.labels={recipe.data.labels} needs the images' folder: type data.root=FOLDER")
    root = Path(recipe.data.root).expanduser()
    wanted = Path(str(recipe.data.labels)).expanduser()
    path = wanted if wanted.is_absolute() or not (root / wanted).is_file() else root / wanted
    reads = tasks.kind(recipe).reads
    columns, rows, divides = read_rows(path, root, reads, recipe.data)
    parts: dict[str, list[Row]] = {}
    for row in rows:
        if row.part is None and divides:
            raise SetupError(
                f"{path}, line {row.number}: nothing says whether {row.file} is for training: put it below "
                "train/ or val/, or add a column `split` with train or val"
            )
        parts.setdefault(row.part or "train", []).append(row)
    held_out, notes = held_out_of(parts, before.test, path)
    train, val, others = (parts.pop(part or "", []) for part in ("train", held_out, "test"))
    if others:
        notes["beside"] = f"not looked at in {path}: {len(others):,} rows of {SPLIT} test"
    for some, name in ((train, "train"), (val, "val")):
        if not some and divides:
            raise SetupError(f"{path} has no row of {SPLIT} {name}; both sets need images")
    names, targets, told = targets_of(path, columns, (train, val, others), reads)
    trains, holds = (
        PhotoFolder(root, [row.file for row in some], labels)
        for some, labels in zip((train, val), targets, strict=True)
    )
    holdout = f"the held-out rows of {path}"
    if not divides:
        trains, holds, holdout = divided(trains, recipe, before)
    return photos(recipe, trains, holds, names, holdout, notes | told, drawn=not divides)


def read_rows(path: Path, root: Path, reads: Reads, data: DataRecipe) -> tuple[tuple[str, ...], list[Row], bool]:
    """The columns with labels, all rows, and whether these say which set they are in. Raises SetupError."""
    header, lines = read_lines(path)
    wanted = [data.label_column] if isinstance(data.label_column, str) else data.label_column or []
    for key, name in [("image_column", data.image_column or header[0]), *(("label_column", name) for name in wanted)]:
        if name not in header:
            raise SetupError(f"data.{key}={name} is no column of {path}; its columns are {few(header, 6)}")
    image, labels = header.index(data.image_column or header[0]), [*map(header.index, wanted)]
    split = next((n for n, name in enumerate(header) if name.lower() == SPLIT and n not in (image, *labels)), None)
    labels = labels or [n for n in range(len(header)) if n not in (split, image)]
    if (root / plain(header[image])).is_file():
        raise SetupError(f"{path}, line 1 names an image: put a header above it, such as file,label")
    rows: dict[str, Row] = {}
    for number, cells in lines:
        file = plain(cells[image])
        if not (root / file).is_file():
            raise SetupError(
                f"{path}, line {number}: {root / file} is not there: column {header[image]} has paths below "
                f"data.root={root}, such as train/cat-1.jpg: correct or remove the line, or type "
                "data.image_column= of another column"
            )
        if file in rows:  # it might be held out under one label, and trained on under another
            advice = "write its classes in one line, as cat;dog" if reads == "classes" else "keep one of them"
            raise SetupError(f"{path}, line {number}: {file} is in line {rows[file].number} too: {advice}")
        part = part_named(cells[split] if split is not None else file.partition("/")[0])
        rows[file] = Row(number, file, part, tuple(cells[n] for n in labels))
    divides = split is not None or any(row.part for row in rows.values())
    return tuple(header[n] for n in labels), [*rows.values()], divides


def targets_of(
    path: Path, columns: tuple[str, ...], parts: Sequence[Sequence[Row]], reads: Reads
) -> tuple[tuple[str, ...], list[npt.NDArray[Any]], dict[str, str]]:
    """Names of classes or values, the targets of the training and the held-out rows, and notes. Raises SetupError."""
    train, val, _ = parts
    cells = [row.cells[0] for some in parts for row in some if row.cells]  # those of all, whichever part is held out
    if reads == "class" and len(columns) == 1:
        named = class_names((row.cells[0] for row in train), (row.cells[0] for row in val))
        if several := next((name for name in named.names if SEPARATOR in name), None):
            raise SetupError(f"{path}: '{several}' looks like several classes: add task.name=multilabel")
        measures = all(map(_is_number, named.names)) and (
            len(named.names) > DIGITS or not all(map(str.isdigit, named.names))
        )
        if measures and len(named.names) > len(train) / 2:  # hardly any comes twice
            raise SetupError(
                f"{path}: {columns[0]} holds {len(named.names)} different numbers for {len(train)} images, such as "
                f"{named.names[-1]}: where they are measures and no classes, add task.name=regression; where they are "
                f"classes, write them as words, such as class-{named.names[-1]}"
            )
        for row in (row for row in (*train, *val) if not row.cells[0] or row.cells[0] not in named.places):
            what = f"no training image has the class '{row.cells[0]}'" if row.cells[0] else f"{row.file} has no class"
            raise SetupError(f"{path}, line {row.number}: {what}")
        places = [np.array([named.places[row.cells[0]] for row in some], np.int64) for some in (train, val)]
        return tuple(named.names), places, named.notes
    if reads == "classes" and len(columns) == 1 and not {*BINARY} >= {*map(str.lower, cells)}:
        if other := next((cell for cell in cells if "|" in cell), None):
            raise SetupError(f"{path}: '{other}': write {SEPARATOR} between classes, or a column of 0 and 1 each")
        named = class_names(name for cell in cells for name in _several(cell))
        matrices = [np.zeros((len(some), len(named.names)), np.float32) for some in (train, val)]
        for some, targets in zip((train, val), matrices, strict=True):
            for n, row in enumerate(some):
                targets[n, [named.places[name] for name in _several(row.cells[0])]] = 1
        return tuple(named.names), matrices, named.notes
    if reads in ("classes", "values") and columns:
        numbers = ([_numbers(path, row) for row in some] for some in (train, val))
        return columns, [np.array(some, np.float32).reshape(-1, len(columns)) for some in numbers], {}
    others = f"its other columns are {few(columns, 6)}: data.label_column=NAME takes one"
    raise SetupError(f"{path} needs {WANTED[reads]}; {others}")


def _numbers(path: Path, row: Row) -> list[float]:
    cells = [BINARY.get(cell.lower(), cell) for cell in row.cells]
    if not all(map(_is_number, cells)):
        raise SetupError(
            f"{path}, line {row.number}: {few(row.cells)} are not all numbers: write a dot before decimals "
            "and nothing between thousands, or choose columns, data.label_column=[A,B]"
        )
    return [*map(float, cells)]


def read_lines(path: Path) -> tuple[list[str], list[Line]]:
    """A table's header, and its lines that are not empty with their numbers. Raises SetupError."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if "\0" in text[:1000]:
            raise ValueError("it holds zero bytes")
        mark = "\t" if "\t" in text.lstrip("\r\n").partition("\n")[0] else ","
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark, skipinitialspace=True)
        lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    except OSError as error:
        raise SetupError(f"data.labels={path} cannot be read ({error.strerror})") from None
    except (ValueError, csv.Error) as error:
        advice = "save it as UTF-8 (Excel: Save As, CSV UTF-8)"
        raise SetupError(f"data.labels={path} cannot be read ({error}): {advice}") from None
    if len(lines) < 2 or len(lines[0][1]) < 2:
        raise SetupError(
            f"data.labels={path} needs a header and rows with commas or tabs between their cells, such as file,label "
            "and train/cat-1.jpg,cat below it"
        )
    header = lines[0][1]
    for number, cells in lines[1:]:
        if len(cells) != len(header):
            raise SetupError(f"{path}, line {number}: {len(cells)} cells, and the header has {len(header)}")
    return header, lines[1:]


def plain(cell: str) -> str:
    """The path that a cell holds, also as Windows and `find .` write it."""
    return os.path.normpath(cell.replace("\\", "/"))


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def _several(cell: str) -> list[str]:
    return [name.strip() for name in cell.split(SEPARATOR) if name.strip()]

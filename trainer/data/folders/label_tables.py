"""Tables with the labels of a folder's images: data.labels=FILE.csv."""

import csv
import io
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer import tasks
from trainer.data.folders.layout import Before, class_names, held_out_of, part_named
from trainer.data.folders.photo_folders import PhotoFolder, photos
from trainer.data.sampling import Array
from trainer.data.sets import Datasets
from trainer.errors import SetupError
from trainer.recipe import DataRecipe, Recipe
from trainer.recipe.text import list_some
from trainer.tasks.classification import class_name
from trainer.tasks.task import Reads

# Name of the column with the part (train, val or test) of each image.
SPLIT = "split"
# Separator between the classes of an image.
SEPARATOR = ";"
# A column that contains only numbers may hold class names, such as 0 to 9, or measurements. If its
# number of distinct values exceeds half the number of training images, it is refused, because it
# probably holds measurements. A column of whole numbers is never refused for this reason if it has
# at most `MAX_DIGIT_CLASSES` distinct values.
MAX_DIGIT_CLASSES = 10
# Spellings of 0 and 1, including those of pandas and R, in lower case.
BINARY = {
    "true": "1",
    "false": "0",
    "1": "1",
    "0": "0",
    "1.0": "1",
    "0.0": "0",
}
# Spellings of missing values in files of common programs, in lower case.
MISSING = (
    "nan",
    "-nan",
    "<na>",
    "#na",
    "#n/a",
    "n/a",
    "null",
)

# Line number and cells of a row.
Line = tuple[int, list[str]]

# Description of the columns that a task needs, for error messages.
NEEDED_COLUMNS = {
    "class": "a column with each image's class",
    "classes": "a column with each image's classes, as cat;dog, or a column of 0 and 1 for each "
    "class",
    "values": "a column of numbers for each value",
}


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        number: number of the line in the file, from 1.
        file: path of the image below data.root.
        part: train, val or test, or None for no part. The name of the part is read from the column
            `split`, or from the first directory of `file` if the table has no such column.
        cells: cells of the columns with labels.
    """

    number: int
    file: str
    part: str | None
    cells: tuple[str, ...]


def open_table(recipe: Recipe, before: Before) -> Datasets:
    """Open the images that the table `data.labels` lists as a data set.

    The table is a CSV file with a header. One column contains the path of an image below data.root;
    it is the first column unless the recipe names another one. A column `split` may contain train,
    val or test. All other columns are labels, unless data.label_column names the labels.

    Raises:
        SetupError: the table cannot be read, or does not match the images or the task.
    """
    if recipe.data.root is None:
        raise SetupError(
            f"data.labels={recipe.data.labels} needs the images' folder: type data.root=FOLDER"
        )
    root = Path(recipe.data.root).expanduser()
    path = Path(str(recipe.data.labels)).expanduser()
    if not path.is_absolute() and (root / path).is_file():
        path = root / path
    reads = tasks.find_task_class(recipe).reads
    columns, rows, divides = read_rows(path, root, reads, recipe.data)
    parts: dict[str, list[Row]] = {}
    for row in rows:
        if row.part is None and divides:
            raise SetupError(
                f"{path}, line {row.number}: nothing says whether {row.file} is for training: put "
                "it below train/ or val/, or add a column `split` with train or val"
            )
        parts.setdefault(row.part or "train", []).append(row)
    held_out, notes = held_out_of(parts, before.test, path)
    train, val, others = (parts.pop(part or "", []) for part in ("train", held_out, "test"))
    if others:
        notes["beside"] = f"not looked at in {path}: {len(others):,} rows of {SPLIT} test"
    for some, name in ((train, "train"), (val, "val")):
        if not some and divides:
            raise SetupError(f"{path} has no row of {SPLIT} {name}; both sets need images")
    names, targets, name_notes = targets_of(path, columns, (train, val, others), reads)
    val_photos = None
    if divides:
        val_photos = PhotoFolder(root, [row.file for row in val], targets[1])
    return photos(
        recipe,
        before,
        PhotoFolder(root, [row.file for row in train], targets[0]),
        val_photos,
        names,
        f"the held-out rows of {path}",
        notes | name_notes,
    )


def read_rows(
    path: Path, root: Path, reads: Reads, data: DataRecipe
) -> tuple[tuple[str, ...], list[Row], bool]:
    """Read the rows of a table.

    Args:
        path: the table.
        root: directory of the images.
        reads: the kind of labels that the task needs.
        data: the recipe's `data` section, which may name the columns.

    Returns:
        (columns, rows, divides): names of the columns with labels, all rows, and whether the table
        has a column `split` or any row has a part.

    Raises:
        SetupError: the table is not valid, or an image does not exist.
    """
    header, lines = read_lines(path)
    label_columns = data.label_column or []
    if isinstance(label_columns, str):
        label_columns = [label_columns]
    label_columns = [*map(class_name, label_columns)]
    image_column = class_name(data.image_column or header[0])
    for key, names in (("image_column", [image_column]), ("label_column", label_columns)):
        for name in names:
            if name not in header:
                raise SetupError(
                    f"data.{key}={name} is no column of {path}; its columns are "
                    f"{list_some(header, 6)}"
                )
    image = header.index(image_column)
    labels = [*map(header.index, label_columns)]
    split = None
    for column, name in enumerate(header):
        if name.lower() == SPLIT and column not in (image, *labels):
            split = column
            break
    labels = labels or [n for n in range(len(header)) if n not in (split, image)]
    if (root / plain(header[image])).is_file():
        raise SetupError(
            f"{path}, line 1 names an image: put a header above it, such as file,label"
        )
    rows: dict[str, Row] = {}
    for number, cells in lines:
        file = plain(cells[image])
        if os.path.isabs(file):
            # Use one form of path, so that an image that is listed twice is recognized.
            file = os.path.relpath(file, root.absolute())
        if not (root / file).is_file():
            raise SetupError(
                f"{path}, line {number}: {root / file} is not there: column {header[image]} has "
                f"paths below data.root={root}, such as train/cat-1.jpg: correct or remove the "
                "line, or type data.image_column= of another column"
            )
        for column, cell in enumerate(cells):
            if column != image:
                _check_cell(
                    f"{path}, line {number}", cell, root, reads != "values" and column in labels
                )
        # Refuse an image in two lines: it could be in both the training and the validation split.
        if file in rows:
            advice = "keep one of them"
            if reads == "classes":
                advice = "write its classes in one line, as cat;dog"
            raise SetupError(
                f"{path}, line {number}: {file} is in line {rows[file].number} too: {advice}"
            )
        part = part_named(cells[split] if split is not None else file.partition("/")[0])
        rows[file] = Row(number, file, part, tuple(cells[n] for n in labels))
    divides = split is not None or any(row.part for row in rows.values())
    return tuple(header[n] for n in labels), [*rows.values()], divides


def targets_of(
    path: Path, columns: tuple[str, ...], parts: Sequence[Sequence[Row]], reads: Reads
) -> tuple[Sequence[str], list[Array], dict[str, str]]:
    """Convert labels to targets.

    Args:
        path: the table, for error messages.
        columns: names of the columns with labels.
        parts: the rows of the training split, of the validation split, and all other rows.
        reads: the kind of labels that the task needs.

    Returns:
        (names, targets, notes): names of the classes or values; the targets of the training rows
        and of the validation rows; and notes for a run's banner.

    Raises:
        SetupError: the labels do not match the task.
    """
    train, val, _ = parts
    # If an image can have several classes, the rows of all parts determine the classes, so that the
    # classes are the same whichever part is the validation split.
    cells = [row.cells[0] for row in chain(*parts) if row.cells]
    if reads == "class" and len(columns) == 1:
        named = class_names((row.cells[0] for row in train), (row.cells[0] for row in val))
        if several := next((name for name in named.names if SEPARATOR in name), None):
            raise SetupError(
                f"{path}: '{several}' looks like several classes: add task.name=multilabel"
            )
        are_numbers = all(map(_is_number, named.names))
        are_digits = all(map(str.isdigit, named.names))
        measures = are_numbers and (len(named.names) > MAX_DIGIT_CLASSES or not are_digits)
        # Most measurements occur once, while most classes have several images.
        if measures and len(named.names) > len(train) / 2:
            raise SetupError(
                f"{path}: {columns[0]} holds {len(named.names)} different numbers for {len(train)} "
                f"images, such as {named.names[-1]}: where they are measures and no classes, add "
                "task.name=regression; where they are classes, write them as words, such as "
                f"class-{named.names[-1]}"
            )
        for row in (*train, *val):
            if not row.cells[0]:
                raise SetupError(f"{path}, line {row.number}: {row.file} has no class")
            if row.cells[0] not in named.places:
                raise SetupError(
                    f"{path}, line {row.number}: no training image has the class '{row.cells[0]}'"
                )
        places = []
        for some in (train, val):
            indices = [named.places[row.cells[0]] for row in some]
            places.append(np.array(indices, np.int64))
        return named.names, places, named.notes
    if reads == "classes" and len(columns) == 1 and not {*BINARY} >= {*map(str.lower, cells)}:
        if other := next((cell for cell in cells if "|" in cell), None):
            raise SetupError(
                f"{path}: '{other}': write {SEPARATOR} between classes, or a column of 0 and 1 each"
            )
        named = class_names(chain.from_iterable(map(_several, cells)))
        matrices = []
        for rows in (train, val):
            targets = np.zeros((len(rows), len(named.names)), np.float32)
            for n, row in enumerate(rows):
                for name in _several(row.cells[0]):
                    targets[n, named.places[name]] = 1
            matrices.append(targets)
        return named.names, matrices, named.notes
    if reads in ("classes", "values") and columns:
        matrices = []
        for rows in (train, val):
            numbers = [_numbers(path, row) for row in rows]
            matrices.append(np.array(numbers, np.float32).reshape(-1, len(columns)))
        return columns, matrices, class_names(columns).notes
    raise SetupError(
        f"{path} needs {NEEDED_COLUMNS[reads]}; its other columns are {list_some(columns, 6)}: "
        "data.label_column=NAME takes one"
    )


def _check_cell(
    where: str,
    cell: str,
    root: Path,
    is_label: bool,
) -> None:
    """Refuse a label that stands for a missing value, and a cell that contains other rows.

    Raises:
        SetupError: a label is in `MISSING`, or a quote is closed too late, so that the cell
            contains the following rows.
    """
    if is_label and any(name.lower() in MISSING for name in _several(cell)):
        raise SetupError(
            f"{where}: '{cell}' is how programs write a missing value: remove the line, or write "
            "another"
        )
    if "\n" in cell or "\r" in cell:
        for part in re.split("[\n\r\t,]", cell):
            if (root / plain(part.strip(' "'))).is_file():
                raise SetupError(
                    f"{where}: a cell between quotes holds {part}, which is an image: close its "
                    "quote"
                )


def _numbers(path: Path, row: Row) -> list[float]:
    cells = [BINARY.get(cell.lower(), cell) for cell in row.cells]
    if not all(map(_is_number, cells)):
        raise SetupError(
            f"{path}, line {row.number}: {list_some(row.cells)} are not all numbers: write a dot "
            "before decimals and nothing between thousands, or choose columns, "
            "data.label_column=[A,B]"
        )
    return [*map(float, cells)]


def read_lines(path: Path) -> tuple[list[str], list[Line]]:
    """Return the header of a table, and all other lines that are not empty.

    Raises:
        SetupError: the file cannot be read, or is not a valid table.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if "\0" in text:
            raise ValueError(
                f"line {text.count(chr(10), 0, text.index(chr(0))) + 1} holds a zero byte"
            )
    except OSError as error:
        raise SetupError(f"data.labels={path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise SetupError(
            f"data.labels={path} cannot be read ({error}): save it as UTF-8 (Excel: Save As, CSV "
            "UTF-8)"
        ) from None
    lines = [*_records(path, text)]
    if len(lines) < 2 or len(lines[0][1]) < 2:
        raise SetupError(
            f"data.labels={path} needs a header and rows with commas or tabs between their cells, "
            "such as file,label and train/cat-1.jpg,cat below it"
        )
    header = [class_name(name) for name in lines[0][1]]
    if twice := [name for name, count in Counter(header).items() if name and count > 1]:
        raise SetupError(
            f"{path}, line {lines[0][0]}: several columns are called {list_some(twice)}: rename "
            "all but one"
        )
    for number, cells in lines[1:]:
        if len(cells) != len(header):
            raise SetupError(
                f"{path}, line {number}: {len(cells)} cells, and the header has {len(header)}"
            )
    return header, lines[1:]


def _records(path: Path, text: str) -> Iterator[Line]:
    """Yield each row that is not empty, with the number of its first line.

    Raises:
        SetupError: a quote is not closed, so that its cell would contain the following rows.
    """
    mark = ","
    if "\t" in text.lstrip("\r\n").partition("\n")[0]:
        mark = "\t"
    # Without quotes, the csv module reads the text itself, which is faster.
    lines = []
    if '"' in text:
        lines = io.StringIO(text, newline="").readlines()
    # In strict mode, the csv module refuses blanks between a closing quote and the separator, so
    # remove these blanks.
    tidy = (
        re.sub(r'(?<=") +(?=[,\t\r\n]|$)', "", line) if '" ' in line else line for line in lines
    )
    reader = csv.reader(
        tidy if lines else io.StringIO(text, newline=""),
        delimiter=mark,
        skipinitialspace=True,
        strict=True,
    )
    read = 0
    try:
        for row in reader:
            if lines and "".join(lines[read : reader.line_num]).count('"') % 2:
                raise csv.Error("a quote without its counterpart")
            if any(row):
                yield read + 1, [cell.strip() for cell in row]
            read = reader.line_num
    except csv.Error as error:
        raise SetupError(
            f'{path}, line {read + 1}: {error}: write a cell with quotes as "5"" nail", between '
            "quotes and each twice"
        ) from None


def plain(cell: str) -> str:
    """Normalize the path in a cell, such as train\\1.jpg from Windows or ./1.jpg from `find .`."""
    return os.path.normpath(cell.replace("\\", "/"))


def _is_number(cell: str) -> bool:
    try:
        # float() accepts 1_000, which other programs do not read as a number.
        return "_" not in cell and math.isfinite(float(cell))
    except ValueError:
        return False


def _several(cell: str) -> list[str]:
    return [name.strip() for name in cell.split(SEPARATOR) if name.strip()]

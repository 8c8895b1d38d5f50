"""Metrics of `evaluate`: the table of the classes on the screen, and metrics.csv."""

import csv
import io
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.errors import DiskFullError, RecipeError, SetupError
from trainer.processes.terminal import say, terminal_width
from trainer.saving.files import (
    describe_error,
    escape_non_utf8,
    format_csv,
    read,
    report_write_errors,
    write_atomically,
)
from trainer.saving.locks import wait_for_lock
from trainer.saving.run_names import find_run_folder
from trainer.telemetry.readable import escape_control_characters, format_table
from trainer.training.presenting import format_class

FILE = "metrics.csv"
# What to do after freeing space on a full disk.
AGAIN = "evaluate again"
# Columns that say which evaluation a row belongs to. An evaluation replaces its own rows only.
KEY = ("checkpoint", "split", "data")
# Maximum number of classes on the screen. Of more classes, those with the lowest F1 are shown.
SHOWN = 20
# Titles of the columns that do not have the name of their metric.
TITLES = {"f1": "F1", "auroc": "AUROC", "average_precision": "AP"}


def format_classes(names: Sequence[str], columns: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the lines of the table of the classes, at most as wide as the terminal.

    The name of a class comes last, and continues below itself if it is too long.

    Args:
        names: Names of the classes.
        columns: Metrics of each class, as `tabulate_classes` returns them.
    """
    present = [index for index, support in enumerate(columns["support"]) if support]
    order = present
    lines = []
    if len(present) > SHOWN:
        order = sorted(present, key=columns["f1"].__getitem__)[:SHOWN]
        lines.append(f"the {SHOWN} of {len(present)} classes with the lowest F1:")
    rows = [[*(TITLES.get(name, name) for name in columns), "class"]]
    for index in order:
        cells = []
        for name, values in columns.items():
            text = f"{values[index]:.2%}"
            if math.isnan(values[index]):
                text = "-"
            if name == "support":
                text = f"{values[index]:,.0f}"
            cells.append(text)
        rows.append([*cells, escape_control_characters(format_class(names, index))])
    lines += format_table(rows, range(len(columns)), terminal_width() - 2)
    return textwrap.indent("\n".join(lines), "  ").split("\n")


def _format_numbers(values: Mapping[str, float]) -> dict[str, str]:
    """Format metrics as cells of the file. An undefined metric (NaN) has an empty cell."""
    return {name: "" if math.isnan(value) else f"{value:.10g}" for name, value in values.items()}


def choose_file(output: str | None, weights: Path) -> tuple[Path, str]:
    """Choose the path of metrics.csv.

    Args:
        output: Path from `output=`; None for a file in the run folder, or next to the weights.
        weights: Path of the evaluated weights, or of a checkpoint.

    Returns:
        The path, and the path of the weights relative to its folder, as a row names them.

    Raises:
        RecipeError: `output` is a folder.
    """
    path = (find_run_folder(weights) or weights.parent) / FILE
    if output is not None:
        path = Path(output).expanduser()
        if path.is_dir():
            raise RecipeError(f"output={output} is a folder: name a file, as in {path / FILE}")
    return path, os.path.relpath(weights.resolve(), path.absolute().parent.resolve())


def write_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write rows to metrics.csv, and keep the rows of other evaluations in it.

    A lock on the folder makes several evaluations write one after the other.

    Raises:
        RecipeError: The existing file was not written by `evaluate`.
        SetupError: The file cannot be written.
        DiskFullError: The disk is full.
    """
    columns = []
    # Rows of other evaluations.
    kept = []
    key = [rows[0][name] for name in KEY]
    with report_write_errors(path.parent, AGAIN), wait_for_lock(path.parent):
        try:
            stored = csv.DictReader(io.StringIO(read(path).decode(), newline=""))
            columns = [*(stored.fieldnames or ())]
            if tuple(columns[: len(KEY)]) != KEY:
                raise ValueError("its first columns are not those of metrics.csv")
            kept = [row for row in stored if [row[name] for name in KEY] != key]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, csv.Error) as error:
            raise RecipeError(
                f"{path} is not a file of evaluate ({describe_error(error)}): choose another "
                "output=, as in output=metrics.csv"
            ) from None
        for row in rows:
            columns += [name for name in row if name not in columns]
        table = [columns]
        for row in (*kept, *rows):
            table.append([row.get(name) or "" for name in columns])
        write_atomically(path, format_csv(table), again=AGAIN)


def report(
    output: str | None,
    path: Path,
    key: Mapping[str, str],
    metrics: Mapping[str, float],
    names: Sequence[str],
    columns: Mapping[str, Sequence[float]],
) -> None:
    """Print the table of the classes, and write metrics.csv.

    The file gets a row for the whole split, whose class is empty, and a row for each class.

    Args:
        output: Path from `output=`. Without it, an error is printed as one line instead of raised.
        path: Path of the file.
        key: Values of the columns `KEY`, which identify the evaluation.
        metrics: Metrics of the whole split.
        names: Names of the classes.
        columns: One number per class for each metric; empty if the task has no classes.

    Raises:
        RecipeError, SetupError, DiskFullError: See `write_rows`.
    """
    if columns:
        say("\n".join(format_classes(names, columns)))
    rows = [{**key, "class": "", **_format_numbers(metrics)}]
    for index in range(len(columns.get("support", ()))):
        cells = {name: values[index] for name, values in columns.items()}
        class_name = escape_non_utf8(format_class(names, index))
        rows.append({**key, "class": class_name, **_format_numbers(cells)})
    try:
        write_rows(path, rows)
        say(f"  metrics  {path}")
    except (RecipeError, SetupError, DiskFullError) as error:
        if output is not None:
            raise
        say(f"  metrics.csv is left out: {error}")

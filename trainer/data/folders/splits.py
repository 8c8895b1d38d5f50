"""Held-out images where the data set has no split: a fraction of each class, the same images every time."""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.data.sampling import Array
from trainer.errors import SetupError
from trainer.processes.rank import is_restart
from trainer.saving.files import opened, portable
from trainer.saving.run_folder import RunFolder

SPLIT_FILE = "split.csv"  # of a run folder: the split that was drawn for it; data.labels= takes it too
HEADER = ("file", "label", "split")


class Before(NamedTuple):
    """The split of an earlier run, for images that are opened again.

    Attributes:
        held_out: the names of the images that were held out; None: those that the recipe's seed draws.
        elsewhere: whether these may be other images, of which then all are held out.
    """

    held_out: frozenset[str] | None = None
    elsewhere: bool = False


NOTHING_BEFORE = Before()


def draw(names: Sequence[str], labels: Array, fraction: float, seed: int) -> Array:
    """Which of the images to hold out: (images,) bool.

    Of each class the fraction, rounded, at least one and never all; of a class with one image none. Depends on an
    image's name and the seed alone: neither the order of files nor other classes change anything.
    """
    keys = [hashlib.blake2b(f"{seed}/".encode() + os.fsencode(name), digest_size=8).digest() for name in names]
    drawn = np.frombuffer(b"".join(keys), ">u8")
    chosen = np.zeros(len(names), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = min(len(members) - 1, max(1, round(fraction * len(members))))
        chosen[members[np.argsort(drawn[members], kind="stable")][:count]] = True
    return chosen


def hold_out(
    names: Sequence[str], labels: Array, fraction: float, seed: int, before: Before, where: str
) -> tuple[Array, str]:
    """Which of the images are held out, (images,) bool, and that in words.

    Raises:
        SetupError: nothing would be held out, or left to train.
    """
    if before.held_out is not None:
        known = np.array([portable(name) in before.held_out for name in names], bool)
        if known.any() and not known.all():
            return known, f"{int(known.sum())} of {where}, as when the run began ({SPLIT_FILE})"
        if not before.elsewhere:
            raise SetupError(
                f"{where}: of the images that this run holds out ({SPLIT_FILE} in its folder) "
                f"{'only those are' if known.any() else 'none is'} there: put them back, or choose another output="
            )
    if before.elsewhere:
        return np.ones(len(names), bool), f"all of {where}"
    chosen = draw(names, labels, fraction, seed)
    if not chosen.any():
        raise SetupError(f"{where}: every class has one image, so none can be held out: give each two or more")
    return chosen, f"{fraction:.3g} of each class of {where}, drawn by file name and seed={seed} (data.val_fraction)"


def continued(folder: RunFolder) -> Before:
    """The split of the run that is continued in a folder, or of an earlier start of the same job."""
    return Before(held_out_of(folder.path)) if folder.resuming or is_restart() else NOTHING_BEFORE


def table(parts: Iterable[tuple[str, Iterable[tuple[str, str]]]]) -> str:
    """The text of split.csv; `parts` are the names of the parts with their files and labels."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(HEADER)
    lines.writerows((portable(file), label, part) for part, rows in parts for file, label in rows)
    return text.getvalue()


def held_out_of(path: Path) -> frozenset[str] | None:
    """The images that a run held out, as `part_of`."""
    return part_of(path, "val")


def part_of(path: Path, part: str) -> frozenset[str] | None:
    """The images of a part, `train` or `val`, of a run, by its folder, a checkpoint in it or its weights.

    None: it drew no split.

    Raises:
        SetupError: its split.csv cannot be read.
    """
    folders = (path, *path.absolute().parents[:3])
    file = next((folder for folder in folders if (folder / "recipe.yaml").is_file()), path) / SPLIT_FILE
    if not os.path.lexists(file):
        return None
    try:
        with opened(file) as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="") as text:
            return frozenset(row["file"] for row in csv.DictReader(text) if row["split"] == part)
    except (OSError, UnicodeError, csv.Error, KeyError) as error:
        raise SetupError(
            f"{file} cannot be read ({type(error).__name__}): remove it, and the seed draws the split again"
        ) from None

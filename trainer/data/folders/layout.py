"""The layout of a folder of photos: which part trains and which is held out; where none is, a fraction of each class,
the same images every time. And what classes are called, and in which order, wherever images have theirs."""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import numpy as np

from trainer.data.folders.scanning import LOOSE, LeftOut, few, images_below, listed
from trainer.data.sampling import Array
from trainer.errors import SetupError
from trainer.processes.rank import is_restart
from trainer.saving.files import opened, portable
from trainer.saving.run_folder import RunFolder
from trainer.saving.run_names import run_folder
from trainer.tasks.classification import class_name

# Names of folders, in upper or lower case; the first that exists is used.
PARTS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
TRAIN, TEST, HELD_OUT = PARTS["train"], PARTS["test"], PARTS["val"] + PARTS["test"]
HOLDOUT_FILE = "split.csv"  # of a run folder: the split that was drawn for it; data.labels= takes it too


class ClassFolders(NamedTuple):
    """Where class folders are."""

    train: Path
    held_out: Path | None  # None where a part of the training images is to be held out
    beside: tuple[str, ...] = ()  # folders that belong to neither


class ClassNames(NamedTuple):
    """Classes as they are called."""

    names: list[str]
    places: dict[str, int]  # in `names`, of each text that was given
    notes: dict[str, str]  # for a run's banner


def class_names(texts: Iterable[str], others: Iterable[str] = ()) -> ClassNames:
    """The classes that `texts` name, sorted; `others` have places where they name one of these too."""
    forms = {text: class_name(text) for text in texts}
    order = {form: place for place, form in enumerate(sorted({*forms.values()}))}
    forms |= {text: class_name(text) for text in others}
    places = {text: order[form] for text, form in forms.items() if form in order}
    twice = [portable(form) for form, count in Counter(forms.values()).items() if count > 1]
    shown = ", ".join(twice[:4]) + ", ..." * (len(twice) > 4)
    notes = {"names": f"{shown}: written in two Unicode forms, each one class"} if twice else {}
    return ClassNames([*map(portable, order)], places, notes)


def part_named(name: str) -> str | None:
    """The part that a folder, or a cell of a table, is called: train, val or test."""
    return next((part for part, names in PARTS.items() if name.lower() in names), None)


def held_out_of(parts: Collection[str | None], test: bool, where: object) -> tuple[str | None, dict[str, str]]:
    """Which of the parts there is held out: val, or else test; where `test` is asked for, that. Raises SetupError.

    With a note for a run's banner.
    """
    if test and not {"train", "test"} <= {*parts}:
        raise SetupError(f"split=test: {where} has no test part with classes beside a training part: leave split= out")
    part = "test" if test else next((part for part in ("val", "test") if part in parts), None)
    alone = part == "test" and not test
    return part, {"test": "held out for want of val: it chooses the best epoch, and is no test of it"} if alone else {}


def layout_of(root: Path, left: LeftOut, test: bool = False) -> ClassFolders:
    """Where `root` has its training and its held-out images; the latter are those of `test` where it is asked for.
    Raises SetupError."""
    folders, _ = listed(root, LeftOut())
    train, held_out = _named(folders, TRAIN), _held_out(root, folders, test)
    if train is not None:
        left[LOOSE] += len(listed(root, left)[1])  # else `classes_of` counts the images beside the classes
        others = tuple(name for name in folders if root / name not in (root / train, held_out))
        return ClassFolders(root / train, held_out, others)
    if held_out is not None:
        alone = quote(f"data.root={held_out}")
        raise SetupError(
            f"{root} holds {held_out.name} and no train: move the classes to be trained to {root / 'train'}, or type "
            f"{alone}, which trains on that and holds out a part"
        )
    above = root.absolute().parent
    if folders and root.absolute().name.lower() in TRAIN and os.access(above, os.R_OK):
        held_out = _held_out(above, listed(above, LeftOut())[0], test)
    return ClassFolders(root, held_out)


def _held_out(root: Path, folders: Sequence[str], test: bool) -> Path | None:
    """The held-out part among a folder's folders; not a test part without classes, as competitions have one."""
    name = _named(folders, TEST if test else HELD_OUT)
    alone = name is None or (part_named(name) == "test" and not listed(root / name, LeftOut())[0])
    return None if name is None or alone else root / name


def _named(folders: Sequence[str], names: Sequence[str]) -> str | None:
    """The folder that has one of these names, in upper or lower case; of several the first."""
    return next((folder for wanted in names for folder in folders if folder.lower() == wanted), None)


def classes_of(folder: Path, left: LeftOut) -> dict[str, list[str]]:
    """Classes with their images, as paths below `folder`, all in alphabetical order. Raises SetupError."""
    folders, images = listed(folder, left)
    if not folders:
        found = f"{len(images)} images and" if images else f"no images that can be read here{left.in_brackets()} and"
        raise SetupError(
            f"{folder} holds {found} no class folders: put each class's images in a folder of its own, "
            f"{folder}/<class>/*.jpg, or name their labels in a table: data.labels=FILE.csv"
        )
    left[LOOSE] += len(images)
    named, classes = class_names(folders), defaultdict[int, list[str]](list)
    for name in folders:
        paths = [*images_below(os.path.join(folder, name), left, name)]
        if not paths:
            raise SetupError(
                f"{folder / name} holds no images that can be read here{left.in_brackets()}: remove the folder or put "
                "images there (JPEG, PNG, WebP, ...)"
            )
        classes[named.places[name]] += paths
    left.named |= named.notes
    return {name: sorted(classes[place]) for place, name in enumerate(named.names)}


def check_several(train: Path, classes: dict[str, list[str]]) -> None:
    """Refuse a single class, and a split within each class. Raises SetupError."""
    # The folders within each class folder that hold its images.
    inside = [{path.split("/")[1] for path in paths if path.count("/") > 1} for paths in classes.values()]
    if len(classes) == 1:
        (only,), root = classes, quote(f"data.root={train / next(iter(classes))}")
        deeper = f"; if what it holds ({few(sorted(inside[0]))}) is the data set, type {root}" * bool(inside[0])
        raise SetupError(
            f"{train} holds one class, '{only}': put the images of each in a folder of its own, {train}/<class>{deeper}"
        )
    if len(splits := sorted(filter(part_named, set.intersection(*inside)))) > 1:
        raise SetupError(f"{train}: each class holds {' and '.join(splits)}: put the classes into these")


class Before(NamedTuple):
    """The split of an earlier run, for images that are opened again."""

    # the names of the images that were held out; None: those that the recipe's seed draws
    held_out: frozenset[str] | None = None
    elsewhere: bool = False  # whether these may be other images, of which then all are held out
    test: bool = False  # whether the test part is to be held out


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
    """Which of the images are held out, (images,) bool, and that in words. Raises SetupError."""
    if before.held_out is not None:
        known = np.array([portable(name) in before.held_out for name in names], bool)
        if known.any() and not known.all():
            return known, f"{int(known.sum())} of {where}, as when the run began ({HOLDOUT_FILE})"
        if not before.elsewhere:
            raise SetupError(
                f"{where}: of the images that this run holds out ({HOLDOUT_FILE} in its folder) "
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
    return Before(part_of(folder.path, "val")) if folder.resuming or is_restart() else NOTHING_BEFORE


def part_of(path: Path, part: str) -> frozenset[str] | None:
    """The images of a part, `train` or `val`, of a run, by its folder, a checkpoint in it or its weights.

    None: it drew no split. Raises SetupError.
    """
    file = (run_folder(path) or path) / HOLDOUT_FILE
    if not os.path.lexists(file):
        return None
    try:
        with opened(file) as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="") as text:
            return frozenset(row["file"] for row in csv.DictReader(text) if row["split"] == part)
    except (OSError, UnicodeError, csv.Error, KeyError) as error:
        raise SetupError(
            f"{file} cannot be read ({type(error).__name__}): remove it, and the seed draws the split again"
        ) from None

"""Layout of a folder of photos: training and validation parts, and names and order of classes.

If a folder has neither a validation nor a test part, a fraction of each class is drawn as
validation images. The same seed always draws the same images.
"""

import csv
import io
import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import numpy as np

from trainer.data.division import describe_fold, draw, draw_fold
from trainer.data.folders.scanning import LOOSE, LeftOut, images_below, listed
from trainer.data.sampling import Array
from trainer.errors import SetupError
from trainer.processes.rank import is_restart
from trainer.recipe import Recipe
from trainer.recipe.text import list_some
from trainer.saving.files import escape_non_utf8, open_regular
from trainer.saving.run_folder import RunFolder
from trainer.saving.run_names import find_run_folder
from trainer.tasks.classification import class_name

# Names of the folders of each part, in upper or lower case. If a folder contains several of them,
# the first one in this list is used.
PARTS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
TRAIN = PARTS["train"]
TEST = PARTS["test"]
HELD_OUT = PARTS["val"] + PARTS["test"]
# File of a run folder with the split that the run drew. data.labels= accepts this file, too.
HOLDOUT_FILE = "split.csv"


class ClassNames(NamedTuple):
    """Names of the classes of a data set, and their spellings.

    Attributes:
        names: sorted names of the classes.
        places: index of the class in `names` for each spelling of its name.
        notes: notes for a run's banner.
    """

    names: list[str]
    places: dict[str, int]
    notes: dict[str, str]


def class_names(texts: Iterable[str], others: Iterable[str] = ()) -> ClassNames:
    """Determine the classes from their names. Several names may be spellings of the same class.

    Args:
        texts: names as written in a folder or table.
        others: names from another split, as written there. If such a name is a spelling of a class
            in `texts`, it is added to `ClassNames.places`. Otherwise, it is ignored.
    """
    forms = {text: class_name(text) for text in texts}
    order = {form: place for place, form in enumerate(sorted({*forms.values()}))}
    forms |= {text: class_name(text) for text in others}
    places = {text: order[form] for text, form in forms.items() if form in order}
    twice = [escape_non_utf8(form) for form, count in Counter(forms.values()).items() if count > 1]
    notes = {}
    if twice:
        notes["names"] = f"{list_some(twice)}: written in two Unicode forms, each one class"
    looks = Counter(map(_look, order))
    if alike := [escape_non_utf8(form) for form in order if looks[_look(form)] > 1]:
        notes["alike"] = (
            f"{list_some(alike, 8)}: classes of their own, though their names differ in case or "
            "blanks alone"
        )
    return ClassNames([*map(escape_non_utf8, order)], places, notes)


def _look(name: str) -> str:
    """Return a key that is equal for similar names, such as 1.0 and 01, or cat and Cat."""
    with suppress(ValueError):
        return str(float(name))
    letters = unicodedata.normalize("NFKC", name).casefold()
    return "".join(letter for letter in letters if letter.isprintable() and not letter.isspace())


def part_named(name: str) -> str | None:
    """Return the part (train, val or test) that a folder or a table's cell names, if any."""
    for part, names in PARTS.items():
        if name.lower() in names:
            return part
    return None


def held_out_of(
    parts: Collection[str | None], test: bool, where: object
) -> tuple[str | None, dict[str, str]]:
    """Choose the part that is the validation split: val if it exists, or else test.

    Args:
        parts: the parts that exist.
        test: whether the user requires the test part.
        where: path of the data, for the error message.

    Returns:
        (part, notes): the chosen part, or None if neither exists, and notes for a run's banner.

    Raises:
        SetupError: there is no test part, but the user requires it.
    """
    if test:
        if not {"train", "test"} <= {*parts}:
            raise SetupError(
                f"split=test: {where} has no test part with classes beside a training part: leave "
                "split= out"
            )
        return "test", {}
    if "val" in parts:
        return "val", {}
    if "test" in parts:
        note = "held out for want of val: it chooses the best epoch, and is no test of it"
        return "test", {"test": note}
    return None, {}


def layout_of(
    root: Path,
    left: LeftOut,
    test: bool,
) -> tuple[Path, Path | None, Sequence[str]]:
    """Find the directories that contain the class directories of a data set.

    If `root` itself has the name of a training part, the validation images may be next to `root`.

    Args:
        root: the user's data.root.
        left: counter of ignored files, to which this function adds the files that it ignores.
        test: whether the validation images must be those of the test part.

    Returns:
        (train, held_out, beside): the directory of the training images; that of the validation
        images, or None if these are drawn from `train`; and the names of the other directories next
        to `train`, which are not read.

    Raises:
        SetupError: there are validation images but no training images.
    """
    folders, _ = listed(root, LeftOut())
    train = _named(folders, TRAIN)
    held_out = _held_out(root, folders, test)
    if train:
        # Images next to the train folder are ignored, so count them. `classes_of` counts the
        # images next to class folders.
        left[LOOSE] += len(listed(root, left)[1])
        others = [name for name in folders if root / name not in (root / train, held_out)]
        return root / train, held_out, others
    if held_out is not None:
        alone = quote(f"data.root={held_out}")
        raise SetupError(
            f"{root} holds {held_out.name} and no train: move the classes to be trained to "
            f"{root / 'train'}, or type {alone}, which trains on that and holds out a part"
        )
    above = root.absolute().parent
    if folders and root.absolute().name.lower() in TRAIN and os.access(above, os.R_OK):
        held_out = _held_out(above, listed(above, LeftOut())[0], test)
    return root, held_out, ()


def _held_out(
    root: Path,
    folders: Sequence[str],
    test: bool,
) -> Path | None:
    """Return the directory of validation images among the folders of `root`, if any.

    A test part without class folders is ignored. Competitions publish such parts without labels.
    """
    name = _named(folders, TEST if test else HELD_OUT)
    if name is None:
        return None
    if part_named(name) == "test" and not listed(root / name, LeftOut())[0]:
        return None
    return root / name


def _named(folders: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the first folder that has one of the names, in upper or lower case, if any."""
    for name in names:
        for folder in folders:
            if folder.lower() == name:
                return folder
    return None


def classes_of(folder: Path, left: LeftOut) -> dict[str, list[str]]:
    """Return the sorted classes, each with the sorted paths of its images below `folder`.

    Raises:
        SetupError: there are no class folders, or a class has no images.
    """
    folders, images = listed(folder, left)
    if not folders:
        contents = f"no images that can be read here{left.in_brackets()}"
        if images:
            contents = f"{len(images)} images"
        raise SetupError(
            f"{folder} holds {contents} and no class folders: put each class's images in a folder "
            f"of its own, {folder}/<class>/*.jpg, or label them in a table: data.labels=FILE.csv"
        )
    left[LOOSE] += len(images)
    named = class_names(folders)
    classes = defaultdict[int, list[str]](list)
    for name in folders:
        paths = [*images_below(os.path.join(folder, name), left, name)]
        if not paths:
            raise SetupError(
                f"{folder / name} holds no images that can be read here{left.in_brackets()}: "
                "remove the folder or put images there (JPEG, PNG, WebP, ...)"
            )
        classes[named.places[name]] += paths
    left.named |= named.notes
    return {name: sorted(classes[place]) for place, name in enumerate(named.names)}


def check_several(train: Path, classes: dict[str, list[str]]) -> None:
    """Refuse data with a single class, or with a split inside each class.

    Raises:
        SetupError: there is one class, or every class folder contains folders of the same parts,
            such as train and val.
    """
    # Names of the folders with images inside the class folder, for each class.
    inside = []
    for paths in classes.values():
        inside.append({path.split("/")[1] for path in paths if path.count("/") > 1})
    if len(classes) == 1:
        (only,) = classes
        deeper = ""
        if inside[0]:
            root = quote(f"data.root={train / only}")
            deeper = (
                f"; if what it holds ({list_some(sorted(inside[0]))}) is the data set, type {root}"
            )
        raise SetupError(
            f"{train} holds one class, '{only}': put the images of each in a folder of its own, "
            f"{train}/<class>{deeper}"
        )
    if len(splits := sorted(filter(part_named, set.intersection(*inside)))) > 1:
        raise SetupError(
            f"{train}: each class holds {' and '.join(splits)}: put the classes into these"
        )


class Before(NamedTuple):
    """The split of an earlier run, for a data set that is opened again.

    Attributes:
        held_out: names of the validation images; None if the recipe's seed draws them.
        elsewhere: whether the data set may be a different one than that of the earlier run. If it
            cannot be divided as in that run, all images are validation images.
        test: whether to use the test part as the validation split.
    """

    held_out: frozenset[str] | None = None
    elsewhere: bool = False
    test: bool = False


NOTHING_BEFORE = Before()


def hold_out(
    names: Sequence[str], labels: Array, recipe: Recipe, before: Before, where: str
) -> tuple[Array, str]:
    """Choose the validation images: those of an earlier run, all images, or a new draw.

    If the validation images of an earlier run with data.fold are not known by name, its fold is
    drawn again even if `before.elsewhere` is true. Otherwise all images would be evaluated, among
    them those that the run trained on.

    Args:
        names: names of the images.
        labels: (images,) classes.
        recipe: the recipe.
        before: the split of an earlier run, if any.
        where: path of the images, for messages.

    Returns:
        (chosen, description): (images,) bool, whether each image is a validation image, and a
        description of the split for the user.

    Raises:
        SetupError: all images, or none of them, are validation images of an earlier run that had
            the same data set; or no image can be drawn, because each class has only one.
        RecipeError: see `draw_fold`.
    """
    if before.held_out is not None:
        known = np.array([escape_non_utf8(name) in before.held_out for name in names], bool)
        if known.any() and not known.all():
            return known, f"{int(known.sum())} of {where}, as when the run began ({HOLDOUT_FILE})"
        if not before.elsewhere:
            raise SetupError(
                f"{where}: of the images that this run holds out ({HOLDOUT_FILE} in its folder) "
                f"{'only those are' if known.any() else 'none is'} there: put them back, or choose "
                "another output="
            )
    data = recipe.data
    if before.elsewhere and (before.held_out is not None or data.fold is None):
        return np.ones(len(names), bool), f"all of {where}"
    if data.fold:
        return draw_fold(recipe, names, labels), describe_fold(recipe, where)
    chosen = draw(names, labels, data.val_fraction, recipe.seed)
    if not chosen.any():
        raise SetupError(
            f"{where}: every class has one image, so none can be held out: give each two or more"
        )
    return (
        chosen,
        f"{data.val_fraction:.3g} of each class of {where}, drawn by file name and "
        f"seed={recipe.seed} "
        "(data.val_fraction)",
    )


def continued(folder: RunFolder) -> Before:
    """Return the split of the run that is resumed, or of an earlier attempt of the same job.

    For a new run, return `NOTHING_BEFORE`.
    """
    if folder.resuming or is_restart():
        return Before(part_of(folder.path, "val"))
    return NOTHING_BEFORE


def part_of(path: Path, part: str) -> frozenset[str] | None:
    """Return the names of a run's training or validation images, or None if it drew no split.

    Args:
        path: the run folder, a checkpoint in it, or the run's weights.
        part: "train" or "val".

    Raises:
        SetupError: the file with the split cannot be read.
    """
    file = (find_run_folder(path) or path) / HOLDOUT_FILE
    if not os.path.lexists(file):
        return None
    try:
        with (
            open_regular(file) as binary,
            io.TextIOWrapper(binary, encoding="utf-8", newline="") as text,
        ):
            return frozenset(row["file"] for row in csv.DictReader(text) if row["split"] == part)
    except (OSError, UnicodeError, csv.Error, KeyError) as error:
        raise SetupError(
            f"{file} cannot be read ({type(error).__name__}): remove it, and the seed draws the "
            "split again"
        ) from None

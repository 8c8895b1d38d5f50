"""How a folder of photos is laid out: which part trains and which is held out, however they are called.

What cannot be told is one sentence with what to type.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from trainer.data.folders.scanning import LeftOut, class_images, few, is_image, listed
from trainer.errors import SetupError

TRAIN = ("train", "training")  # in any case, as are the next; the first that is there is taken
TEST = ("test", "testing")
HELD_OUT = ("val", "valid", "validation", *TEST)

SIBLINGS = 1000  # folders that are looked into for images


class ClassFolders(NamedTuple):
    """Where class folders lie.

    Attributes:
        held_out: None where a share of the training images is to be held out.
        beside: folders that belong to neither.
    """

    train: Path
    held_out: Path | None
    beside: tuple[str, ...] = ()


def layout_of(root: Path, left: LeftOut) -> ClassFolders:
    """Where `root` has its training and its held-out images.

    Raises:
        SetupError: it is no folder of classes; the sentence says what was found and what to type.
    """
    folders, images = listed(root, LeftOut())
    train, held_out = (_called(root, folders, names) for names in (TRAIN, HELD_OUT))
    if train is not None and held_out is not None and _has_no_labels(root / held_out):
        held_out = None
    others = tuple(name for name in folders if name not in (train, held_out))
    if train is not None:
        left.loose(len(listed(root, left)[1]))  # else what lies beside the classes is counted with them
        return ClassFolders(root / train, root / held_out if held_out else None, others)
    if held_out is not None and others:
        moved = " ".join(quote(str(root / name)) for name in others[:4]) + " ..." * (len(others) > 4)
        train_at = quote(str(root / "train"))
        raise SetupError(
            f"{root} holds {held_out} and no train: if {few(others)} are classes to train, "
            f"mkdir {train_at} && mv {moved} {train_at}/"
        )
    if held_out is not None:
        raise SetupError(
            f"{root} holds {held_out} and no train; {_word(root / held_out)} trains on that and holds out a part"
        )
    if not folders:
        raise SetupError(_flat(root, images))
    if len(folders) == 1:
        _check_one(root, folders[0])
    if root.absolute().name.lower() in TRAIN and (beside := _beside(root.absolute().parent)) is not None:
        return ClassFolders(root, beside)
    return ClassFolders(root, None)


def _beside(parent: Path) -> Path | None:
    """The held-out part of a folder; None also where the folder cannot be listed."""
    found: list[str] = []
    with suppress(OSError):
        found = [name for name in os.listdir(parent) if name.lower() in HELD_OUT and (parent / name).is_dir()]
    name = _called(parent, found, HELD_OUT)
    return parent / name if name is not None and not _has_no_labels(parent / name) else None


def _has_no_labels(held_out: Path) -> bool:
    """Whether it is a test folder of images alone, as competitions give them out: nothing can be told from it."""
    return held_out.name.lower() in TEST and not listed(held_out, LeftOut())[0]


def _word(root: Path) -> str:
    """The word that names a folder, as a shell takes it."""
    return quote(f"data.root={root}")


def _called(root: Path, folders: Sequence[str], names: Sequence[str]) -> str | None:
    """The folder that has one of these names, in any case."""
    for wanted in names:
        found = [name for name in folders if name.lower() == wanted]
        if len(found) > 1:
            raise SetupError(f"{root} holds {' and '.join(found)}, which mean the same: keep one of them")
        if found:
            return found[0]
    return None


def classes_of(folder: Path, left: LeftOut) -> dict[str, list[str]]:
    """The class folders in alphabetical order, each with its images in order, as paths below `folder`.

    Raises:
        SetupError: there are none, or one without images.
    """
    classes, images = listed(folder, left)
    if not classes:
        raise SetupError(_flat(folder, images))
    left.loose(len(images))
    return dict(zip(classes, class_images(folder, classes, left), strict=True))


def check_several(layout: ClassFolders, classes: dict[str, list[str]]) -> None:
    """Refuse what holds nothing to tell apart, or holds its split below its classes.

    Raises:
        SetupError: with what to move where.
    """
    inside = {name: _inner(paths) for name, paths in classes.items()}
    splits = [name for name in next(iter(inside.values())) if name.lower() in (*TRAIN, *HELD_OUT)]
    if len(classes) > 1 < len(splits) and all(set(splits) <= set(names) for names in inside.values()):
        new = layout.train.absolute().parent / f"{layout.train.absolute().name}-split"
        raise SetupError(
            f"{layout.train}: each class holds its own {' and '.join(splits)}, and they belong above the classes: "
            f"cd {quote(str(layout.train))} && for part in {' '.join(splits)}; do mkdir -p {quote(str(new))}/$part; "
            f'for name in *; do mv "$name/$part" {quote(str(new))}/$part/"$name"; done; done; then '
            f"{_word(new)}"
        )
    if len(classes) > 1:
        return
    only, folders = next(iter(inside.items()))
    place = layout.train / only
    found = f"{layout.train} holds one class, '{only}'"
    if not folders:
        apart = f"{layout.train}/<class>" + (f" and {layout.held_out}/<class>" if layout.held_out else "")
        raise SetupError(
            f"{found}, and a classifier tells classes apart: put the images of each in a folder of its own, {apart}"
        )
    found += f", holding {len(folders)} folders of images ({few(folders)})"
    if _has(folders, TRAIN) and _has(folders, HELD_OUT):
        raise SetupError(f"{found}: {_word(place)}")
    parts = [part for part in (layout.train, layout.held_out) if part is not None]
    raise SetupError(
        f"{found}: they are the classes if they lie one level higher, "
        + " && ".join(f"mv {quote(str(part / only))}/* {quote(str(part))}/" for part in parts)
    )


def _inner(paths: Iterable[str]) -> list[str]:
    """The folders in a class folder that its images lie in."""
    return sorted({path.split("/")[1] for path in paths if path.count("/") > 1})


def _has(folders: Iterable[str], names: Sequence[str]) -> bool:
    return any(name.lower() in names for name in folders)


def _check_one(root: Path, only: str) -> None:
    """Refuse a folder that holds one folder: what is in that one says what was meant."""
    place = root / only
    folders, images = listed(place, LeftOut())
    while len(folders) == 1 and not images and not _has(folders, TRAIN):
        place /= folders[0]
        folders, images = listed(place, LeftOut())
    if _has(folders, TRAIN) or len(folders) > 1:
        raise SetupError(f"{root} holds one folder, '{only}', and deeper in it {few(folders)}: {_word(place)}")


def _with_images_beside(folder: Path) -> list[str]:
    """Other folders that hold images beside one that may be a class; none beside one that is a part of a split."""
    if folder.name.lower() in (*TRAIN, *HELD_OUT):
        return []
    found: list[str] = []
    with suppress(OSError, SetupError):
        for name in listed(folder.parent, LeftOut())[0][:SIBLINGS]:
            with suppress(OSError), os.scandir(folder.parent / name) as entries:
                if name != folder.name and any(is_image(entry.name) for entry in entries):
                    found.append(name)
    return found


def _flat(folder: Path, images: Sequence[str]) -> str:
    """What to say of a folder without folders."""
    tables = sorted(entry.name for entry in os.scandir(folder) if entry.name.lower().endswith(".csv"))
    apart = f"put each class's images in a folder of its own, {folder}/<class>/*.jpg"
    if not images:
        own = LeftOut()
        listed(folder, own)
        ignored = f" ({own.told()})" if own.told() else ""
        return f"{folder} holds no class folders and no images that can be read here{ignored}; {apart}"
    found = f"{folder} holds {len(images)} image{'s' * (len(images) > 1)} and no class folders; "
    if tables:
        return f"{found}if {tables[0]} tells their labels, {quote(f'data.labels={folder / tables[0]}')}, else {apart}"
    stems = sorted({match[1] for name in images if (match := re.match(r"([^\W\d_]+)[\W\d_]", name))})
    if 1 < len(stems) <= len(images) / 2:
        move = " && ".join(f"mkdir {stem} && mv {stem}?*.* {stem}/" for stem in stems[:3]) + " ..." * (len(stems) > 3)
        there = quote(str(folder))
        return f"{found}if their names begin with the class ({few(stems)}), cd {there} && {move}; else {apart}"
    if beside := _with_images_beside(folder.absolute()):
        others = f"{few(beside)} beside it hold{'s' * (len(beside) == 1)} images too"
        above = Path(os.path.normpath(folder / ".."))
        return f"{found}{others}: if the folders are classes, {_word(above)}; else {apart}"
    return f"{found}{apart}, or name their labels in a table: data.labels=FILE.csv"

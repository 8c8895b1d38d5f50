"""What is to be labelled: a folder, a list of files, paths on stdin, or a split of a data set."""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from trainer.data import Datasets, ImageSet, PhotoSource, TensorSet
from trainer.data.class_names import shared_depth
from trainer.data.folders.layout import part_named
from trainer.data.folders.photo_folders import LOOKED_AT
from trainer.data.folders.scanning import NEEDS, LeftOut, few, images_below, is_image
from trainer.data.photos.decoding import formats, without_warnings
from trainer.data.photos.pixel_range import PixelValues, Range
from trainer.data.sampling import contiguous_span
from trainer.errors import RecipeError, SetupError, TrainerError
from trainer.recipe.text import shown
from trainer.saving import files
from trainer.saving.files import portable
from trainer.tasks.classification import class_name
from trainer.telemetry.readable import counted

FIRST = 20  # lines of a list, of which one at least is there
LONGEST = 100_000  # characters of a path in a list; the system takes 4,096


class Item(NamedTuple):
    """One image: its name in the results, what a worker gets, and its class where that is known."""

    path: str
    payload: Any
    label: int | None


@dataclass(frozen=True)
class Inputs:
    """A stream of images."""

    name: str  # in words
    count: int | None  # images, where that is known before they come
    items: Iterator[Item]
    source: PhotoSource | None = None  # what payloads that are indices point into
    total: int | None = None  # of all ranks
    ignored: str = ""  # other files among them, in words
    doubt: str = ""  # a warning about the range of their pixels
    unlabelled: str = ""  # which of them have no label, where others have one, or could have


def image_files(
    roots: str | Sequence[str],
    classes: Sequence[str],
    rank: int = 0,
    size: int = 1,
    pixel_range: Range | None = None,
) -> Inputs:
    """The images that are named: by a folder (recursively, in alphabetical order), an image, a list of paths, or stdin
    where it is -; or by several of these.

    Their folders may be their labels, see `labels_of`. Of several ranks each takes a contiguous part. Raises
    SetupError, RecipeError.
    """
    roots = [roots] if isinstance(roots, str) else roots
    places = {class_name(name): place for place, name in enumerate(classes)}
    if "-" in roots:
        if size > 1:
            raise RecipeError("- reads standard input, which several ranks cannot share: give a file with the paths")
        if len(roots) > 1:
            raise RecipeError("- reads all paths from standard input: leave out the others, or write them there")
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
        lines = _lines(sys.stdin)
        stream = (Item(path, path, labels_of([path], None, places)[0].get(path)) for path in lines)
        return Inputs("paths from stdin", None, stream)
    listed = {root: _paths_of(root, size) for root in roots}
    paths = [path for root in roots for path in listed[root][0]]
    ignored = {root: left for root, (_, left) in listed.items() if left}
    start, stop = contiguous_span(len(paths), rank, size)
    folders = [root for root in roots if os.path.isdir(os.path.expanduser(root))]
    single = [path for root in roots if root not in folders for path in listed[root][0]]
    found = {root: labels_of(listed[root][0], os.path.expanduser(root), places) for root in folders}
    found |= {"files": labels_of(single, None, places)}
    labels = {path: label for each, _ in found.values() for path, label in each.items()}
    unlabelled = {root: why for root, (_, why) in found.items() if why}
    items = (Item(path, path, labels.get(path)) for path in paths[start:stop])
    doubt = "" if rank else doubt_of(paths, pixel_range)
    name = roots[0] if len(roots) == 1 else f"{roots[0]} and {len(roots) - 1} more"
    return Inputs(name, stop - start, items, None, len(paths), _joined(ignored), doubt, _joined(unlabelled))


def labels_of(paths: Sequence[str], root: str | None, places: Mapping[str, int]) -> tuple[dict[str, int], str]:
    """The classes of images by their folders, and in words which have none though others have one, or could have.

    They are the folders below `root` (None: below all that the paths share) at the first depth where one is named like
    a class, of which `places` are given; else `root` itself (None: the only one that they share and that is named so).
    Folders of parts, such as train, may lie above them.
    """
    folders = {folder: _names(folder) for folder in {os.path.dirname(path) for path in paths} if places}
    if not folders:
        return {}, ""
    start = shared_depth([*folders.values()]) if root is None else len(_names(root))
    depths = {folder: _depth(names, start, places) for folder, names in folders.items()}
    depth = min((depth for depth in depths.values() if depth is not None), default=start - 1)
    above = next(iter(folders.values()))[:start]
    known = [name for name in above if name in places]
    if known and (known[-1] == above[-1] or (root is None and depth < start)):
        if depth < start and len(known) == 1:
            return dict.fromkeys(paths, places[known[0]]), ""
        known += [names[depth] for folder, names in folders.items() if depths[folder] == depth][:1]
        why = f"{' and '.join(known[-2:])}, one inside the other, are both named like classes"
        return {}, f"none are taken from folders, for {why}: give the folder that holds those of all classes"
    labels = {path: places[folders[at][depth]] for path in paths if depths[at := os.path.dirname(path)] == depth}
    others = sorted({names[depth] for at, names in folders.items() if depths[at] != depth and len(names) > depth})
    if not labels or len(labels) == len(paths):
        return labels, ""
    why = f"no class is called {few(others)}" if others else "they lie beside the folders of classes"
    return labels, f"{counted(len(paths) - len(labels), 'image')} without a label: {why}"


def _names(folder: str) -> tuple[str, ...]:
    """The folders on the way to one."""
    return tuple(portable(class_name(name)) for name in Path(os.path.abspath(folder)).parts)


def _depth(names: Sequence[str], start: int, places: Mapping[str, int]) -> int | None:
    """Which of the names is the first from `start` on that a class has, and no part above a class."""
    known = [depth for depth in range(start, len(names)) if names[depth] in places]
    part = len(known) > 1 and known[1] == known[0] + 1 and part_named(names[known[0]])
    return known[bool(part)] if known else None


def _joined(texts: Mapping[str, str]) -> str:
    """The texts in one line, each with its key where there are several."""
    return next(iter(texts.values())) if len(texts) == 1 else "; ".join(f"{key}: {text}" for key, text in texts.items())


def _paths_of(root: str, size: int) -> tuple[list[str], str]:
    """The images of a folder, a list or a file, and other files there in words. Raises SetupError, RecipeError."""
    path, left = Path(root).expanduser(), LeftOut()
    try:
        if path.is_dir():
            paths = list(images_below(str(path), left, str(path)))
        elif is_image(path.name):
            paths = [str(path)] if path.is_file() else []
        elif path.suffix.lower() in NEEDS and path.is_file():
            left.other(path.name)
            paths = []
        else:
            paths = _listed(path, size)
            first = paths[:FIRST]
            if first and path.is_file() and not any(map(os.path.lexists, first)):
                raise SetupError(
                    f"data.root={root} is not a list of images: {shown(first[0])}, its first line, is not the path of "
                    "a file. Give one path a line, an image, a folder of images, or - for paths from standard input"
                )
    except TrainerError:
        raise
    except OSError as error:
        raise SetupError(
            f"data.root={root}: {error.filename} cannot be read ({error.strerror}); "
            "give a folder, a file of paths, or -"
        ) from None
    if not paths:
        ignored = f" that can be read here{left.in_brackets()}" if left.in_words() else ""
        raise SetupError(
            f"data.root={root} holds no images{ignored}; give a folder (of JPEG, PNG, WebP, ...), a file of paths, or -"
        )
    return paths, left.in_words()


def dataset_split(data: Datasets, name: str, rank: int = 0, size: int = 1) -> Inputs:
    """The images of a data set's `train` or `val` part, in its own order, with their labels."""
    part = data.train if name == "train" else data.val
    start, stop = contiguous_span(len(part), rank, size)
    title = f"{data.name}/{name}"
    if data.plain or isinstance(part, TensorSet):
        raise RecipeError(f"data.name={data.name} holds no images, but predict labels images")
    if isinstance(part, ImageSet):
        rows, images, known = len(part.labels), part.images, _classes(part.labels)
        named = part.where or (lambda n: f"{title}/{n}")
        items = (
            Item(named(n), images[n % rows], None if known is None else known[n % rows]) for n in range(start, stop)
        )
        return Inputs(title, stop - start, items, total=len(part))
    known = _classes(getattr(part, "labels", None))
    photos = (Item(part.where(n), n, None if known is None else known[n]) for n in range(start, stop))
    return Inputs(title, stop - start, photos, part, len(part))


def _classes(labels: Any) -> list[int] | None:
    """The class of each sample, where a data set knows it before its images are read."""
    if labels is None:
        return None
    labels = torch.as_tensor(labels)
    classes: list[int] = labels.tolist()
    return classes if labels.dim() == 1 and not labels.is_floating_point() else None


def doubt_of(paths: Sequence[str], pixel_range: Range | None) -> str:
    """A warning where some of the image files leave the range of their pixels open; empty for photos."""
    looked = PixelValues(pixel_range)
    for path in paths[:: 1 + len(paths) // LOOKED_AT]:
        # What cannot be read has a row that says so.
        with suppress(Exception), without_warnings(), files.opened(path) as file:
            looked.add(Image.open(file, formats=formats()), path)
    try:
        looked.check()
    except SetupError as error:
        return str(error)
    return ""


def _listed(path: Path, ranks: int) -> list[str]:
    """The paths in a file. A pipe is read like stdin, which `data.root=<(find ...)` of a shell is."""
    kind = path.stat().st_mode
    if stat.S_ISFIFO(kind) and ranks > 1:
        raise RecipeError(f"data.root={path} is a pipe, which several ranks cannot share: give a file with the paths")
    if not stat.S_ISFIFO(kind) and not stat.S_ISREG(kind):
        raise SetupError(f"data.root={path} is a device: give a folder, a file of paths, or - for stdin")
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        return list(_lines(file))


def _lines(file: Any) -> Iterator[str]:
    """The lines of a list of paths, empty ones left out. Raises SetupError."""
    for number, line in enumerate(iter(lambda: file.readline(LONGEST), ""), 1):
        if len(line) == LONGEST or "\0" in line:
            raise SetupError(f"line {number} of the list of images is not a path: give a file with a path a line")
        if path := line.rstrip("\r\n"):
            yield path

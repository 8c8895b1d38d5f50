"""What is to be labelled: folders, files, a list of paths, paths on stdin, or a part of a data set."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer.data import Datasets, ImageSet, PhotoSource, TensorSet
from trainer.data.folders.scanning import NEEDS, LeftOut, images_below, is_image
from trainer.errors import RecipeError, SetupError
from trainer.recipe.text import shown
from trainer.saving import files

FIRST = 20  # lines of a list, of which one at least is the path of a file
LONGEST = 2**30  # bytes of a list


class Item(NamedTuple):
    """One image: its name in the results, what a worker gets, and its class where that is known."""

    path: str
    payload: Any
    label: int | None


@dataclass(frozen=True)
class Inputs:
    """A stream of images."""

    items: Iterator[Item]
    count: int | None  # images, where that is known before they come
    source: PhotoSource | None = None  # what payloads that are indices point into
    ignored: Sequence[str] = ()  # other files among them, in words


def image_files(roots: Sequence[str]) -> Inputs:
    """The images of folders (with their subfolders, in alphabetical order), files, and lists of paths; or of paths
    from stdin, where the root is -. Raises SetupError, RecipeError.
    """
    if "-" in roots:
        if len(roots) > 1:
            raise RecipeError("- reads all paths from standard input: leave out the others, or write them there")
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
        given = (path for line in sys.stdin if (path := line.rstrip("\r\n")))
        if (first := next(given, None)) is None:
            raise RecipeError("standard input held no path: type find photos -type f | python -m trainer predict RUN -")
        return Inputs((Item(path, path, None) for path in chain([first], given)), None)
    found = [_paths_of(root) for root in roots]
    paths = [path for here, _ in found for path in here]
    return Inputs((Item(path, path, None) for path in paths), len(paths), None, [left for _, left in found if left])


def _paths_of(root: str) -> tuple[list[str], str]:
    """The images of a folder, a list or a file, and other files there in words. Raises SetupError."""
    path, left = Path(root).expanduser(), LeftOut()
    wanted = "give a folder of images (JPEG, PNG, WebP, ...), an image, a file with a path a line, or - for stdin"
    try:
        if path.is_dir():
            paths = list(images_below(str(path), left, str(path)))
        elif is_image(path.name):
            paths = [str(path)] if path.is_file() else []
        elif path.suffix.lower() in NEEDS and path.is_file():
            left.other(path.name)
            paths = []
        else:
            text = files.read(path, LONGEST).decode("utf-8-sig", "surrogateescape")
            paths = [line for line in (line.rstrip("\r") for line in text.split("\n")) if line]
            if paths and not any(map(os.path.lexists, paths[:FIRST])):
                first = f"{shown(paths[0])}, its first line, is not the path of a file"
                raise SetupError(f"data.root={root} is not a list of images: {first}; {wanted}")
    except SetupError:
        raise
    except OSError as error:
        raise SetupError(f"data.root={root} cannot be read ({files.why(error)}); {wanted}") from None
    if not paths:
        ignored = f" that can be read here{left.in_brackets()}" if left.in_words() else ""
        raise SetupError(f"data.root={root} holds no images{ignored}; {wanted}")
    return paths, left.in_words()


def dataset_split(data: Datasets, name: str) -> Inputs:
    """The images of a data set's `train` or `val` part, in its own order, with their labels."""
    part, title = data.train if name == "train" else data.val, f"{data.name}/{name}"
    if data.plain or isinstance(part, TensorSet):
        raise RecipeError(f"data.name={data.name} holds no images, but predict labels images")
    known = _classes(getattr(part, "labels", None))
    if isinstance(part, ImageSet):
        rows, images = len(part.labels), part.images
        named = part.where or (lambda n: f"{title}/{n}")
        items = (Item(named(n), images[n % rows], known[n % rows] if known else None) for n in range(len(part)))
        return Inputs(items, len(part))
    photos = (Item(part.where(n), n, known[n] if known else None) for n in range(len(part)))
    return Inputs(photos, len(part), part)


def _classes(labels: Any) -> list[int] | None:
    """The class of each sample, where a data set knows it before its images are read."""
    if labels is None:
        return None
    labels = torch.as_tensor(labels)
    classes: list[int] = labels.tolist()
    return classes if labels.dim() == 1 and not labels.is_floating_point() else None

"""Sources of images to label: directories, files, lists of paths, stdin, or a data set's split."""

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
from trainer.data.folders.scanning import LeftOut, images_below, is_image, what_reads
from trainer.errors import RecipeError, SetupError
from trainer.recipe import format_value
from trainer.saving import files

# A text file counts as a list of paths only if one of its first FIRST lines is an existing path.
FIRST = 20
# Maximum size of a list of paths in bytes; a larger file is refused.
LONGEST = 2**30


class Item(NamedTuple):
    """Image whose class is predicted.

    Attributes:
        path: Name of the image in the results.
        payload: What the worker receives: a path, an index into the data set, or pixels.
        label: Index of the known class; None if it is unknown.
    """

    path: str
    payload: Any
    label: int | None


@dataclass(frozen=True)
class Inputs:
    """Stream of images.

    Attributes:
        items: The images.
        count: Number of images; None if unknown in advance.
        source: Data set that the payloads index; None if they are not indices.
        ignored: Descriptions of the files that are no images, one for each directory that has any.
    """

    items: Iterator[Item]
    count: int | None
    source: PhotoSource | None = None
    ignored: Sequence[str] = ()


def find_images(roots: Sequence[str]) -> Inputs:
    """Return the images of directories, files and lists of paths, or of paths from stdin.

    Args:
        roots: Directories (read with their subdirectories, in alphabetical order), images and files
            with a path on each line; or only "-" for stdin.

    Raises:
        SetupError: A root has no images, or cannot be read.
        RecipeError: Stdin is combined with other roots, or is empty.
    """
    if "-" in roots:
        if len(roots) > 1:
            raise RecipeError(
                "- reads all paths from standard input: leave out the others, or write them there"
            )
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
        lines = (path for line in sys.stdin if (path := line.rstrip("\r\n")))
        first = next(lines, None)
        if first is None:
            raise RecipeError(
                "standard input held no path: type find photos -type f | python -m trainer predict "
                "RUN -"
            )
        return Inputs((Item(path, path, None) for path in chain([first], lines)), None)
    paths = []
    ignored = []
    for root in roots:
        found_paths, others = _list_paths(root)
        paths += found_paths
        if others:
            ignored.append(others)
    return Inputs((Item(path, path, None) for path in paths), len(paths), None, ignored)


def _list_paths(root: str) -> tuple[list[str], str]:
    """List the images of `root`: a directory, an image, or a file with a path on each line.

    Returns:
        (paths, others): the paths of the images, and a description of the other files in the
        directory, empty if there are none.

    Raises:
        SetupError: There are no images, or the root cannot be read.
    """
    path = Path(root).expanduser()
    left = LeftOut()
    remedy = "give a folder of images (JPEG, PNG, WebP, ...), an image, a file with a path on each "
    remedy += "line, or - for stdin"
    try:
        if path.is_dir():
            paths = list(images_below(str(path), left, str(path)))
        elif is_image(path.name):
            paths = [str(path)] if path.is_file() else []
        elif what_reads(path.suffix) and path.is_file():
            left.other(path.name)
            paths = []
        else:
            text = files.read(path, LONGEST).decode("utf-8-sig", "surrogateescape")
            lines = (line.rstrip("\r") for line in text.split("\n"))
            paths = [line for line in lines if line]
            if paths and not any(map(os.path.lexists, paths[:FIRST])):
                raise SetupError(
                    f"data.root={root} is not a list of images: {format_value(paths[0])}, its "
                    f"first line, is not the path of a file; {remedy}"
                )
    except SetupError:
        raise
    except OSError as error:
        raise SetupError(
            f"data.root={root} cannot be read ({files.describe_error(error)}); {remedy}"
        ) from None
    if not paths:
        ignored = ""
        if left.in_words():
            ignored = f" that can be read here{left.in_brackets()}"
        raise SetupError(f"data.root={root} holds no images{ignored}; {remedy}")
    return paths, left.in_words()


def open_split(data: Datasets, name: str) -> Inputs:
    """Return the images of the split "train" or "val" in their own order, with their labels.

    Raises:
        RecipeError: The data set holds no images.
    """
    split = data.train if name == "train" else data.val
    title = f"{data.name}/{name}"
    if data.plain or isinstance(split, TensorSet):
        raise RecipeError(f"data.name={data.name} holds no images, but predict labels images")
    labels = getattr(split, "labels", None)
    classes = [None] * len(split)
    if labels is not None:
        labels = torch.as_tensor(labels)
        # Only a vector of integers holds one class per image. Other labels are the targets of a
        # regression, or several classes per image.
        if labels.dim() == 1 and not labels.is_floating_point():
            classes = labels.tolist()
    if isinstance(split, ImageSet):
        rows = len(split.labels)
        images = split.images
        name_of = split.where or (lambda n: f"{title}/{n}")
        # The images repeat if the split is longer than its tensors.
        items = (Item(name_of(n), images[n % rows], classes[n % rows]) for n in range(len(split)))
        return Inputs(items, len(split))
    photos = (Item(split.where(n), n, classes[n]) for n in range(len(split)))
    return Inputs(photos, len(split), split)

"""Photo folders: root/train/<class>/... and root/val/<class>/... (or root/test)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trainer.data.images import formats, read_image, reason
from trainer.data.photos import NEIGHBOURS, TINY, for_evaluation
from trainer.data.sets import Datasets, ImageSet
from trainer.errors import SetupError
from trainer.recipe import Recipe

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IN_MEMORY_BYTES = 2**30


class PhotoFolder:
    """The images of one split. A million paths are one block of bytes: cheap to hold and to send to workers."""

    def __init__(self, root: Path, files: list[list[str]]) -> None:
        """`files` are paths below `root`, a list for each class."""
        self.root = str(root)
        names = [os.fsencode(name) for group in files for name in group]
        self._names = b"".join(names)
        self._ends = np.cumsum([len(name) for name in names], dtype=np.int64)
        self.labels = np.repeat(np.arange(len(files)), [len(group) for group in files])

    def __len__(self) -> int:
        return len(self._ends)

    def where(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return os.path.join(self.root, os.fsdecode(self._names[start : self._ends[index]]))

    def read(self, index: int, channels: int) -> tuple[Tensor, int]:
        return read_image(self.where(index), channels), int(self.labels[index])


def open_folder(recipe: Recipe) -> Datasets:
    """Scan `data.root`. Folders of tiny images are decoded at once and kept in memory.

    Raises:
        SetupError: something is missing; the line names it.
    """
    if recipe.data.root is None:
        raise SetupError(
            "data.name=imagefolder needs images: type data.root=FOLDER, "
            "a folder with train/<class>/*.jpg and val/<class>/*.jpg"
        )
    root = Path(recipe.data.root).expanduser()
    held_out = next((name for name in ("val", "test") if (root / name).is_dir()), None)
    if held_out is None or not (root / "train").is_dir():
        raise SetupError(f"{root} needs the folders train and val (or test), with a folder of images for each class")
    suffixes = readable_suffixes()
    classes, train = scan(root / "train", suffixes)
    others, val = scan(root / held_out, suffixes)
    for name in sorted(set(classes) ^ set(others)):
        here, there = ("train", held_out) if name in classes else (held_out, "train")
        raise SetupError(f"{root}: class folder '{name}' is in {here} and not in {there}; both need the same classes")
    size, channels = recipe.data.image_size or 224, recipe.data.channels or 3
    bytes_needed = (len(train) + len(val)) * size * size * channels
    tiny = size <= TINY and bytes_needed <= IN_MEMORY_BYTES and recipe.augment.crop != "resized"
    mean, std = statistics(*IMAGENET, channels)
    return Datasets(
        name="imagefolder",
        train=decoded(train, size, channels, recipe, held_out=False) if tiny else train,
        val=decoded(val, size, channels, recipe, held_out=True) if tiny else val,
        classes=tuple(classes),
        channels=channels,
        image_size=size,
        mean=mean,
        std=std,
        synthetic=False,
        split=str(root / held_out),
    )


def statistics(
    mean: tuple[float, ...], std: tuple[float, ...], channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of pixels after a change of channels."""
    if len(mean) == channels:
        return mean, std
    if channels == 3:
        return mean * 3, std * 3

    def luma(values: tuple[float, ...]) -> tuple[float, ...]:
        return (sum(part * share for part, share in zip(values, (0.299, 0.587, 0.114), strict=True)),)

    return luma(mean), luma(std)


def readable_suffixes() -> frozenset[str]:
    """Suffixes, with the dot and in small letters, of the kinds of image that are read."""
    kinds = formats()
    return frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in kinds)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether to look for images below it: not below a link that leads back to a folder above it, or to itself."""
    try:
        if not entry.is_dir() or not entry.is_symlink():
            return entry.is_dir()
    except OSError:
        return False  # as a link to itself: whatever reads it will say so
    target, here = os.path.realpath(entry.path), os.path.realpath(os.path.dirname(entry.path))
    return os.path.commonpath([target, here]) != target


def scan(folder: Path, suffixes: frozenset[str]) -> tuple[list[str], PhotoFolder]:
    """The class folders in alphabetical order, and their images, subfolders included, in order too."""
    try:
        classes = sorted(
            entry.name for entry in os.scandir(folder) if is_folder(entry) and not entry.name.startswith(".")
        )
        files = [sorted(_images(os.path.join(folder, name), name, suffixes)) for name in classes]
    except OSError as error:
        raise SetupError(f"{error.filename or folder} cannot be listed: {error.strerror}") from None
    if not classes:
        raise SetupError(
            f"{folder} holds no class folders; put each class's images in a folder of its own, {folder}/<class>/*.jpg"
        )
    for name, found in zip(classes, files, strict=True):
        if not found:
            raise SetupError(
                f"{folder / name} holds no images; remove the folder or put images there (any kind Pillow reads)"
            )
    return classes, PhotoFolder(folder, files)


def _images(folder: str, below: str, suffixes: frozenset[str]) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_folder(entry):
                if not entry.name.startswith("."):
                    yield from _images(entry.path, f"{below}/{entry.name}", suffixes)
            elif os.path.splitext(entry.name)[1].lower() in suffixes:
                yield f"{below}/{entry.name}"


def decoded(folder: PhotoFolder, size: int, channels: int, recipe: Recipe, held_out: bool) -> ImageSet:
    """Every image of a folder of tiny ones, in memory.

    With data.on_error=skip, an unreadable image is left out when held out and replaced by the next readable one in
    training, as loader workers do it.
    """
    images = torch.empty(len(folder), size, size, channels, dtype=torch.uint8)
    failures: dict[int, str] = {}
    # In this thread: images are so small that several threads take longer, by passing the interpreter lock around.
    for index in range(len(folder)):
        try:
            images[index] = for_evaluation(folder.read(index, channels)[0], size).permute(1, 2, 0)
        except Exception as error:  # decoders raise anything at all
            failures[index] = reason(error)
    named = tuple((folder.where(index), failures[index]) for index in sorted(failures))
    if named and recipe.data.on_error == "stop":
        raise unreadable(*named[0])
    rows = np.arange(len(folder))
    if held_out:
        rows = np.delete(rows, list(failures))
    elif failures:
        for index in sorted(failures):
            near = ((index + step) % len(folder) for step in range(1, NEIGHBOURS))
            rows[index] = next((other for other in near if other not in failures), -1)
    if not len(rows) or rows.min() < 0:
        raise SetupError(f"{folder.root}: hardly any image can be read, the first is {named[0][0]} ({named[0][1]})")
    kept = torch.from_numpy(rows)
    pixels = images if not failures else images[kept]
    return ImageSet(pixels.permute(0, 3, 1, 2), torch.from_numpy(folder.labels)[kept], failures=named)


def unreadable(where: str, why: str) -> SetupError:
    """The error for an image that cannot be read while data.on_error=stop."""
    return SetupError(f"{where} cannot be read ({why}); remove it or set data.on_error=skip")

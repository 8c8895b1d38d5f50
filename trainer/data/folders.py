"""Photo folders: root/train/<class>/... and root/val/<class>/... (or root/test)."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from trainer.data.images import formats, read_image, reason
from trainer.data.photos import NEIGHBOURS, TINY, for_evaluation
from trainer.data.sets import Datasets, ImageSet
from trainer.errors import CheckpointError, SetupError
from trainer.recipe import Recipe
from trainer.recipe.checks import torchvision_classifiers
from trainer.saving import files
from trainer.saving.weights import read_weights

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IN_MEMORY_BYTES = 2**30
PHOTO = 224  # pixels along a side that photos are brought to
LOOKED_AT = 100  # headers of images, to choose a size
GRAY = ("1", "L", "LA", "I", "I;16", "I;16B", "F")  # Pillow's modes
JUNK = ("__MACOSX", "Thumbs.db", "desktop.ini")  # and what begins with a dot: other programs leave these behind

Shape = tuple[int, int, int]  # channels, height, width


class PhotoFolder:
    """The images of one split. A million paths are one block of bytes: cheap to hold and to send to workers."""

    def __init__(self, root: Path, files: Iterable[str], labels: npt.NDArray[Any]) -> None:
        """`files` are paths below `root`, and `labels` (files, ...) what they show."""
        self.root, self.labels = str(root), labels
        names = [os.fsencode(name) for name in files]
        self._names = b"".join(names)
        self._ends = np.cumsum([len(name) for name in names], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def where(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return os.path.join(self.root, os.fsdecode(self._names[start : self._ends[index]]))

    def read(self, index: int, channels: int) -> tuple[Tensor, Tensor]:
        return read_image(self.where(index), channels), torch.as_tensor(self.labels[index])


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
    suffixes, junk = readable_suffixes(), list[str]()
    classes, train = scan(root / "train", suffixes, junk)
    others, val = scan(root / held_out, suffixes, junk)
    for name in sorted(set(classes) ^ set(others)):
        here, there = ("train", held_out) if name in classes else (held_out, "train")
        raise SetupError(f"{root}: class folder '{name}' is in {here} and not in {there}; both need the same classes")
    if len(classes) == 1:
        raise SetupError(_one_class(root, held_out, classes[0], train))
    notes = {}
    if junk:
        named = ", ".join(sorted(set(map(os.path.basename, junk)))[:4])
        notes["skipped"] = f"{len(junk)} hidden files and folders of other programs ({named})"
    return photos(recipe, train, val, classes, str(root / held_out), notes)


def photos(
    recipe: Recipe, train: PhotoFolder, val: PhotoFolder, names: Sequence[str], split: str, notes: Mapping[str, str]
) -> Datasets:
    """A data set of photos; tiny ones are decoded at once."""
    channels, size, looked = image_shape(recipe, header_shapes(train))
    bytes_needed = (len(train) + len(val)) * size * size * channels
    tiny = size <= TINY and bytes_needed <= IN_MEMORY_BYTES and recipe.augment.crop != "resized"
    mean, std = statistics(*IMAGENET, channels)
    return Datasets(
        name="imagefolder",
        train=decoded(train, size, channels, recipe, held_out=False) if tiny else train,
        val=decoded(val, size, channels, recipe, held_out=True) if tiny else val,
        classes=tuple(names),
        channels=channels,
        image_size=size,
        mean=mean,
        std=std,
        synthetic=False,
        split=split,
        notes={**looked, **notes},
    )


def _one_class(root: Path, held_out: str, name: str, train: PhotoFolder) -> str:
    """What to say of a data set with one class, in which there is nothing to tell apart."""
    only = root / "train" / name
    inside = sorted({train.where(index)[len(str(only)) + 1 :].split(os.sep)[0] for index in range(len(train))})
    folders = [entry for entry in inside if (only / entry).is_dir()]
    if not folders:
        return (
            f"{root / 'train'} holds one class, '{name}', and a classifier tells classes apart: "
            f"put the images of each in a folder of its own, {root / 'train'}/<class> and {root / held_out}/<class>"
        )
    found = f"{root / 'train'} holds one class, '{name}', holding {len(folders)} folders of images ({_few(folders)})"
    if "train" in folders and {"val", "test"} & set(folders):
        return f"{found}: data.root={only}"
    return f"{found}: they are the classes if they lie one level higher, " + " and ".join(
        f"mv {root / split / name}/* {root / split}/" for split in ("train", held_out)
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + ", ..." * (len(names) > 4)


def header_shapes(folder: PhotoFolder) -> list[Shape]:
    """(channels, height, width) of some of the images, as their headers tell; none is decoded."""
    shapes = []
    for index in np.linspace(0, len(folder) - 1, min(LOOKED_AT, len(folder))).astype(int):
        with suppress(Exception), warnings.catch_warnings():  # what cannot be read is found in training
            warnings.simplefilter("ignore")
            with files.opened(folder.where(index)) as file, Image.open(file, formats=formats()) as image:
                shapes.append(shape_of(image))
    return shapes


def shape_of(image: Image.Image) -> Shape:
    return (1 if image.mode in GRAY else 3), image.height, image.width


def image_shape(recipe: Recipe, shapes: list[Shape]) -> tuple[int, int, dict[str, str]]:
    """Channels and size to bring images to, and what to say of it.

    What the recipe says; else small square images of one size stay as they are, gray ones gray, and everything else
    becomes what photos are commonly brought to, 3 x 224 x 224, as it does where the model's starting weights or
    torchvision's models want that.
    """
    data, model, sizes = recipe.data, recipe.model, {shape[1:] for shape in shapes}
    height, width = next(iter(sizes)) if len(sizes) == 1 else (PHOTO, PHOTO)
    small = height == width < PHOTO and model.weights is None
    gray = bool(shapes) and all(shape[0] == 1 for shape in shapes)
    coloured = model.weights or model.name in torchvision_classifiers()
    channels = data.channels or (1 if gray and not coloured and _reads_gray(model.init_from) else 3)
    size = data.image_size or (height if small else PHOTO)
    if (data.image_size and data.channels) or not shapes:
        return channels, size, {}
    found = f"{len(shapes)} looked at are {'gray' if gray else 'in colour'}, "
    found += f"{height} x {width}" if len(sizes) == 1 else "of several sizes"
    keys = [f"data.{key}=" for key in ("channels", "image_size") if getattr(data, key) is None]
    note = f"become {channels} x {size} x {size} ({found}); {' and '.join(keys)} choose otherwise"
    return channels, size, {"images": note}


def _reads_gray(init_from: str | None) -> bool:
    """Whether weights to start from, if any, are those of a model of gray images."""
    if init_from is None:
        return True
    with suppress(CheckpointError):  # building the model says what is wrong with them
        return read_weights(Path(init_from).expanduser())[1].get("channels") == "1"
    return False


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


def is_junk(name: str) -> bool:
    """Whether a file or folder is one that a system or program left among the user's: ._IMG.jpg, .DS_Store."""
    return name.startswith(".") or name in JUNK


def scan(folder: Path, suffixes: frozenset[str], junk: list[str]) -> tuple[list[str], PhotoFolder]:
    """The class folders in alphabetical order, and their images, subfolders included, in order too.

    Paths of what other programs left there are added to `junk`.
    """
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
        junk += [entry.path for entry in found if is_junk(entry.name)]
        classes = sorted(entry.name for entry in found if is_folder(entry) and not is_junk(entry.name))
        files = [sorted(_images(os.path.join(folder, name), name, suffixes, junk)) for name in classes]
    except OSError as error:
        raise SetupError(f"{error.filename or folder} cannot be listed: {error.strerror}") from None
    if not classes:
        raise SetupError(
            f"{folder} holds no class folders; put each class's images in a folder of its own, {folder}/<class>/*.jpg"
        )
    for name, images in zip(classes, files, strict=True):
        if not images:
            raise SetupError(
                f"{folder / name} holds no images; remove the folder or put images there (JPEG, PNG, WebP, ...)"
            )
    labels = np.repeat(np.arange(len(files)), [len(group) for group in files])
    return classes, PhotoFolder(folder, itertools.chain.from_iterable(files), labels)


def _images(folder: str, below: str, suffixes: frozenset[str], junk: list[str]) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_junk(entry.name):
                junk.append(entry.path)
            elif is_folder(entry):
                yield from _images(entry.path, f"{below}/{entry.name}", suffixes, junk)
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
    return ImageSet(pixels.permute(0, 3, 1, 2), torch.as_tensor(folder.labels)[kept], failures=named)


def unreadable(where: str, why: str) -> SetupError:
    """The error for an image that cannot be read while data.on_error=stop."""
    return SetupError(f"{where} cannot be read ({why}); remove it or set data.on_error=skip")

"""Photo folders: root/train/<class>/... and root/val/<class>/..., and the other layouts of `layout`."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from trainer import tasks
from trainer.data.encoded import EncodedPhotos, encoded, header_file
from trainer.data.folders.layout import Before, check_several, classes_of, held_out_of, hold_out, layout_of, part_named
from trainer.data.folders.scanning import LeftOut, few
from trainer.data.photos.decoding import formats, reason
from trainer.data.photos.photo_reader import NEIGHBOURS, TINY, held_out
from trainer.data.photos.pixel_range import PixelValues, wanted_of
from trainer.data.photos.stacks import is_stack, read_stack
from trainer.data.sampling import Array
from trainer.data.sets import Datasets, ImageSet
from trainer.errors import SetupError
from trainer.recipe import Recipe
from trainer.recipe.image_sizes import ImageSize, in_pixels, sides, typed_size
from trainer.recipe.known_names import torchvision_classifiers
from trainer.saving.files import csv_text, portable

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LUMA = (0.299, 0.587, 0.114)
IN_MEMORY_BYTES = 2**30
PHOTO = 224  # pixels along a side to which photos are resized
LOOKED_AT = 100  # headers of images, to choose a size
MEASURED = 256  # images, for the mean and standard deviation of channels that nobody knows
GRAY = ("1", "L", "LA", "I", "I;16", "I;16B", "F")  # Pillow's modes
LISTED = 12  # classes whose counts are listed
NAMED = 3  # of several images that cannot be read, besides the first
UNBALANCED = 5  # times as many images as the smallest class

Shape = tuple[int, int, int]  # channels, height, width
Numbers = tuple[float, ...]
Photos = TypeVar("Photos", bound=EncodedPhotos)


class PhotoFolder(EncodedPhotos):
    """The images of one split, in a file each."""

    @cached_property
    def _real(self) -> str:
        return os.path.realpath(self.root)

    def address(self, index: int) -> bytes:
        return os.fsencode(os.path.join(self._real, self.name(index)))


def open_folder(recipe: Recipe, before: Before) -> Datasets:
    """Scan `data.root`. Folders of tiny images are decoded at once and kept in memory. Raises SetupError."""
    if recipe.data.root is None:
        raise SetupError(
            "data.name=imagefolder needs images: type data.root=FOLDER, "
            "a folder with train/<class>/*.jpg and val/<class>/*.jpg, or with <class>/*.jpg alone"
        )
    root, left = Path(recipe.data.root).expanduser(), LeftOut()
    layout = layout_of(root, left, before.test)
    parts = {"train", part_named(layout.held_out.name)} if layout.held_out else set()
    told = held_out_of(parts, before.test, layout.train)[1]
    classes = classes_of(layout.train, left)
    check_several(layout.train, classes)
    train = PhotoFolder(layout.train, *_targets(classes))
    if layout.held_out is None:
        train, val, holdout = divided(train, recipe, before)
    else:
        others = classes_of(layout.held_out, left)
        for name in sorted(set(others) - set(classes) if before.test else set(classes) ^ set(others)):
            here, there = (layout.train.name, layout.held_out.name)[:: 1 if name in classes else -1]
            raise SetupError(
                f"{root}: class folder '{name}' is in {here} and not in {there}; both need the same classes"
            )
        val = PhotoFolder(layout.held_out, *_targets({name: others.get(name, []) for name in classes}))
        holdout = str(layout.held_out)
    notes = left.notes() | told
    if layout.beside:
        notes["beside"] = f"not looked at in {root}: {few(layout.beside)}"
    return photos(recipe, train, val, [*classes], holdout, notes, drawn=layout.held_out is None)


def _targets(classes: Mapping[str, list[str]]) -> tuple[Iterator[str], Array]:
    """The images of all classes, and their classes."""
    labels = np.repeat(np.arange(len(classes)), [len(images) for images in classes.values()])
    return itertools.chain.from_iterable(classes.values()), labels


def divided(whole: Photos, recipe: Recipe, before: Before) -> tuple[Photos, Photos, str]:
    """The training and the held-out images of a set without a split, and the split in words. Raises SetupError."""
    names = [whole.name(index) for index in range(len(whole))]
    labels = whole.labels if whole.labels.ndim == 1 else np.zeros(len(whole), np.int64)
    chosen, holdout = hold_out(names, labels, recipe.data.val_fraction, recipe.seed, before, whole.root)
    if chosen.all():
        return whole, whole, holdout
    return whole.part(np.flatnonzero(~chosen)), whole.part(np.flatnonzero(chosen)), holdout


def holdout_table(train: EncodedPhotos, val: EncodedPhotos, names: Sequence[str]) -> str:
    """The text of a run's split.csv: which images train and which are held out."""
    rows = [("file", "label", "split")]
    for part, split in ((train, "train"), (val, "val")):
        labels = [names[label] for label in part.labels] if part.labels.ndim == 1 else [""] * len(part)
        rows += [(portable(part.name(index)), label, split) for index, label in enumerate(labels)]
    return csv_text(rows)


def class_counts(train: EncodedPhotos, val: EncodedPhotos, names: Sequence[str], balanced: bool) -> dict[str, str]:
    """How many images each class has, for a run's banner, and what to do where some have far fewer."""
    several = train.labels.ndim > 1  # rows of 0 and 1
    here, there = (
        part.labels.sum(0).astype(int) if several else np.bincount(part.labels, minlength=len(names))
        for part in (train, val)
    )
    order = np.argsort(here, kind="stable")
    fewest, most = next((row for row in order if here[row]), 0), order[-1]  # of classes that there are
    listed = range(len(names)) if len(names) <= LISTED else order  # of many classes those with the fewest
    each = few([f"{names[row]} {here[row]} + {there[row]}" for row in listed], LISTED)
    notes = {"classes": f"{each} (training + held out)"}
    if here[most] >= UNBALANCED * here[fewest] and not balanced and not several:
        notes["balance"] = (
            f"{names[most]} has {here[most] / here[fewest]:.0f} times as many images as {names[fewest]}: "
            "data.balance=true draws all classes equally often"
        )
    return notes


def photos(
    recipe: Recipe,
    train: EncodedPhotos,
    val: EncodedPhotos,
    names: Sequence[str],
    holdout: str,
    notes: Mapping[str, str],
    drawn: bool,
) -> Datasets:
    """A data set of photos; tiny ones are decoded at once. `drawn` says that the split was drawn here."""
    train.pixel_range = val.pixel_range = wanted_of(recipe.data)
    values = PixelValues(train.pixel_range)
    channels, size, shape = image_shape(recipe, header_shapes(train, values, recipe.data.channels))
    values.check(channels)
    counts = {} if tasks.kind(recipe).reads == "values" else class_counts(train, val, names, recipe.data.balance)
    bytes_needed = (len(train) + len(val)) * math.prod((*sides(size), channels))
    tiny = max(sides(size)) <= TINY and bytes_needed <= IN_MEMORY_BYTES and recipe.augment.crop != "resized"
    (mean, std), told = statistics(*IMAGENET, channels), {}
    if channels not in (1, 3) and (recipe.data.mean is None or recipe.data.std is None):
        mean, std, looked = measured_photos(train, size, channels)
        told = {"measured": f"data.mean and data.std, over {looked:,} of {len(train):,} training images"}
    return Datasets(
        name=recipe.data.name,
        train=decoded(train, size, channels, recipe, evaluated=False) if tiny else train,
        val=decoded(val, size, channels, recipe, evaluated=True) if tiny else val,
        classes=tuple(names),
        channels=channels,
        image_size=size,
        mean=mean,
        std=std,
        synthetic=False,
        holdout=holdout,
        notes={**shape, **values.notes(), **told, **counts, **notes},
        sources=(train, val),
        holdout_table=partial(holdout_table, train, val, names) if drawn and train is not val else None,
    )


def header_shapes(folder: EncodedPhotos, values: PixelValues, channels: int | None) -> list[Shape]:
    """(channels, height, width) of some of the images, by their headers; `values` looks at pixels that are not bytes,
    for which alone images are decoded."""
    shapes = []
    for index in np.linspace(0, len(folder) - 1, min(LOOKED_AT, len(folder))).astype(int):
        with suppress(Exception), warnings.catch_warnings():  # training reports what cannot be read
            warnings.simplefilter("ignore")
            address, where = folder.address(index), folder.where(int(index))
            with header_file(address) as file:
                stack = is_stack(file.read(6), channels)
                file.seek(0)
                with suppress(UnidentifiedImageError):
                    if not stack:
                        with Image.open(file, formats=formats()) as image:
                            values.add(image, where)
                            shapes.append(shape_of(image))
                            continue
            pixels, kind, _ = read_stack(encoded(address), None)
            shapes.append((pixels.shape[2], *pixels.shape[:2]))
            values.channels[pixels.shape[2]].append(where)
            values.seen(kind, partial(np.asarray, pixels), where)
    return shapes


def shape_of(image: Image.Image) -> Shape:
    return (1 if image.mode in GRAY else 3), image.height, image.width


def image_shape(recipe: Recipe, shapes: list[Shape]) -> tuple[int, ImageSize, dict[str, str]]:
    """Channels and size of the model's images, and a note about them.

    What the recipe says; else small square images of one size stay as they are, gray ones gray, and all others become
    3 x 224 x 224, as do all images where the starting weights or torchvision's models want that.
    """
    data, model, sizes = recipe.data, recipe.model, {shape[1:] for shape in shapes}
    height, width = next(iter(sizes)) if len(sizes) == 1 else (PHOTO, PHOTO)
    torchvisions, started = model.name in torchvision_classifiers(), model.init_from is not None
    small = height == width < PHOTO and model.weights is None and not (started and torchvisions)
    gray = bool(shapes) and all(shape[0] == 1 for shape in shapes)
    coloured = torchvisions or started or model.weights is not None
    channels = data.channels or (1 if gray and not coloured else 3)
    size = typed_size(data.image_size) or (height if small else PHOTO)
    if (data.image_size and data.channels) or not shapes:
        return channels, size, {}
    several = {shape[0] for shape in shapes} - {1, 3}
    kind = f"of {'/'.join(map(str, sorted(several)))} channels" if several else "gray" if gray else "in colour"
    seen = f"{len(shapes)} looked at are {kind}, "
    seen += f"{height} x {width}" if len(sizes) == 1 else "of several sizes"
    keys = [f"data.{key}=" for key in ("channels", "image_size") if getattr(data, key) is None]
    advice = f"{' and '.join(keys)} choose{'s' if len(keys) == 1 else ''} otherwise"
    return channels, size, {"images": f"become {channels} x {in_pixels(size)} ({seen}); {advice}"}


def measured_photos(folder: EncodedPhotos, size: ImageSize, channels: int) -> tuple[Numbers, Numbers, int]:
    """Mean and standard deviation of each channel, over some images as they are for evaluation, and how many these are.
    Pixels are counted by value, so that every rank gets the same bits. Raises SetupError: none can be read."""
    counts, looked, failed = np.zeros((channels, 256), np.int64), 0, ("", "")
    for index in np.linspace(0, len(folder) - 1, min(MEASURED, len(folder))).astype(int).tolist():
        try:
            image = held_out(folder.open(index, channels)[0], size).numpy()
            counts += np.stack([np.bincount(channel.ravel(), minlength=256) for channel in image])
            looked += 1
        except Exception as error:  # decoders raise anything at all
            failed = folder.where(index), reason(error)
    if not looked:
        raise unreadable([failed], len(folder))
    values, shares = np.arange(256) / 255, counts / counts.sum(1, keepdims=True)
    mean = shares @ values
    std = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(1)).clip(1e-3)
    return tuple(mean.tolist()), tuple(std.tolist()), looked


def statistics(
    mean: tuple[float, ...], std: tuple[float, ...], channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of pixels after a change of channels."""
    if len(mean) == channels or channels not in (1, 3):
        return mean, std
    if channels == 3:
        return mean * 3, std * 3
    luma = [sum(part * weight for part, weight in zip(each, LUMA, strict=True)) for each in (mean, std)]
    return (luma[0],), (luma[1],)


def decoded(folder: EncodedPhotos, size: ImageSize, channels: int, recipe: Recipe, evaluated: bool) -> ImageSet:
    """Every image of a folder of tiny ones, in memory.

    With data.on_error=skip, an unreadable image is left out when held out and replaced by the next readable one in
    training, as loader workers do it.
    """
    images = torch.empty(len(folder), *sides(size), channels, dtype=torch.uint8)
    failures: dict[int, str] = {}
    # In one thread: images are so small that several contend for the interpreter lock and take longer.
    for index in range(len(folder)):
        try:
            images[index] = held_out(folder.open(index, channels)[0], size).permute(1, 2, 0)
        except Exception as error:  # decoders raise anything at all
            failures[index] = reason(error)
    named = tuple((folder.where(index), failures[index]) for index in sorted(failures))
    if named and recipe.data.on_error == "stop":
        raise unreadable(named, len(folder))
    rows = np.arange(len(folder))
    if evaluated:
        rows = np.delete(rows, list(failures))
    elif failures:
        for index in sorted(failures):
            near = ((index + step) % len(folder) for step in range(1, NEIGHBOURS))
            rows[index] = next((other for other in near if other not in failures), -1)
    if not len(rows) or rows.min() < 0:
        raise SetupError(f"{folder.root}: hardly any image can be read, the first is {named[0][0]} ({named[0][1]})")
    pixels, labels = (images[rows] if failures else images), torch.as_tensor(folder.labels)[rows]
    where = lambda index: folder.where(int(rows[index]))  # noqa: E731
    return ImageSet(pixels.permute(0, 3, 1, 2), labels, failures=named, where=where)


def unreadable(failures: Sequence[tuple[str, str]], count: int) -> SetupError:
    """The error for images that cannot be read, (path, reason), of so many, while data.on_error=stop."""
    (where, why), *others = failures
    advice = "remove it or set data.on_error=skip"
    if others:
        shown = ", ".join(f"{path} ({reason})" for path, reason in others[:NAMED]) + ", ..." * (len(others) > NAMED)
        more = f", nor can {len(others):,} more of {count:,}: {shown}"
        advice = "remove them or set data.on_error=skip, which lists them in skipped.csv"
    return SetupError(f"{where} cannot be read ({why}){more if others else ''}; {advice}")

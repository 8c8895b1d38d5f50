"""Data sets of photos from folders such as root/train/<class>/..., with image size and statistics.

The module `layout` finds the parts and the classes in a folder.
"""

import itertools
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from trainer import tasks
from trainer.data.division import add_unused, keep_fraction, list_strata
from trainer.data.encoded import EncodedPhotos, open_header, read_encoded
from trainer.data.folders.layout import (
    Before,
    check_several,
    classes_of,
    held_out_of,
    hold_out,
    layout_of,
    part_named,
)
from trainer.data.folders.scanning import LeftOut
from trainer.data.photos.decoding import describe_failure, list_formats
from trainer.data.photos.photo_reader import NEIGHBOURS, TINY, prepare_for_evaluation
from trainer.data.photos.pixel_range import PixelValues, recipe_pixel_range
from trainer.data.photos.stacks import choose_page, is_stack, read_stack
from trainer.data.sampling import Array
from trainer.data.sets import Datasets, ImageSet
from trainer.errors import SetupError
from trainer.recipe import DataRecipe, Recipe
from trainer.recipe.image_sizes import ImageSize, in_pixels, sides, typed_size
from trainer.recipe.known_names import torchvision_classifiers
from trainer.recipe.text import list_some
from trainer.saving.files import escape_non_utf8, format_csv

# Mean and standard deviation of the channels of ImageNet.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Weights of red, green and blue in a gray pixel (ITU-R BT.601).
LUMA = (0.299, 0.587, 0.114)
# Maximum size in bytes of a data set of tiny images (`photo_reader.TINY`) that is decoded at the
# start and kept in memory. Images of a larger data set are decoded each time that they are read.
IN_MEMORY_BYTES = 2**30
# Default length in pixels of the sides of the model's images.
PHOTO_SIDE = 224
# Maximum number of images whose headers are read to choose the number of channels and the size.
MAX_HEADERS = 100
# Maximum number of images that are decoded to measure the mean and standard deviation of channels.
MAX_MEASURED_IMAGES = 256
# Pillow's modes of gray images.
GRAY = ("1", "L", "LA", "I", "I;16", "I;16B", "F")
# Maximum number of classes whose counts are listed. If there are more classes, only the counts of
# this many smallest classes are listed.
MAX_LISTED_CLASSES = 12
# Maximum number of unreadable images that a message names in addition to the first one.
MAX_LISTED_FAILURES = 3
# Minimum ratio of the largest class to the smallest class for which data.balance is suggested.
UNBALANCED_RATIO = 5

# Channels, height and width.
Shape = tuple[int, int, int]
# One number per channel.
Numbers = tuple[float, ...]


class PhotoFolder(EncodedPhotos):
    """The images of one split, each in a separate file."""

    @cached_property
    def _real(self) -> str:
        return os.path.realpath(self.root)

    def address(self, index: int) -> bytes:
        return os.fsencode(os.path.join(self._real, self.name(index)))


def open_folder(recipe: Recipe, before: Before) -> Datasets:
    """Open the folder `data.root` as a data set.

    Tiny images may be decoded immediately and kept in memory: see `photos`.

    Raises:
        SetupError: the folder cannot be read, or its layout is not supported.
    """
    if recipe.data.root is None:
        raise SetupError(
            "data.name=imagefolder needs images: type data.root=FOLDER, "
            "a folder with train/<class>/*.jpg and val/<class>/*.jpg, or with <class>/*.jpg alone"
        )
    root = Path(recipe.data.root).expanduser()
    left = LeftOut()
    train_folder, held_out, beside = layout_of(root, left, before.test)
    parts = set()
    if held_out:
        parts = {"train", part_named(held_out.name)}
    _, split_notes = held_out_of(parts, before.test, root)
    classes = classes_of(train_folder, left)
    check_several(train_folder, classes)
    train = PhotoFolder(train_folder, *_targets(classes))
    val = None
    if held_out is not None:
        others = classes_of(held_out, left)
        only_in_one = set(classes) ^ set(others)
        if before.test:
            # A test part need not contain every class.
            only_in_one = set(others) - set(classes)
        for name in sorted(only_in_one):
            here = train_folder.name
            there = held_out.name
            if name not in classes:
                here, there = there, here
            raise SetupError(
                f"{root}: class folder '{name}' is in {here} and not in {there}; both need the "
                "same classes"
            )
        val = PhotoFolder(held_out, *_targets({name: others.get(name, []) for name in classes}))
    notes = left.notes() | split_notes
    if beside:
        notes["beside"] = f"not looked at in {root}: {list_some(beside)}"
    return photos(recipe, before, train, val, [*classes], str(held_out), notes)


def _targets(classes: Mapping[str, list[str]]) -> tuple[Iterator[str], Array]:
    """Return (paths, labels): the images of all classes, and the class index of each image."""
    counts = [*map(len, classes.values())]
    labels = np.repeat(np.arange(len(classes)), counts)
    return itertools.chain.from_iterable(classes.values()), labels


def holdout_table(
    train: EncodedPhotos,
    val: EncodedPhotos,
    names: Sequence[str],
) -> str:
    """Return the text of a run's split.csv, which lists the images of both splits."""
    rows = [("file", "label", "split")]
    for part, split in ((train, "train"), (val, "val")):
        if part.labels.ndim == 1:
            labels = [names[label] for label in part.labels]
        else:
            labels = [""] * len(part)
        for index, label in enumerate(labels):
            rows.append((escape_non_utf8(part.name(index)), label, split))
    return format_csv(rows)


def class_counts(
    train: EncodedPhotos, val: EncodedPhotos, names: Sequence[str], balanced: bool
) -> dict[str, str]:
    """Return notes for a run's banner: images per class, and advice if classes are unbalanced."""
    # If an image can have several classes, its label is a row of zeros and ones.
    several = train.labels.ndim > 1
    here, there = (
        part.labels.sum(0).astype(int)
        if several
        else np.bincount(part.labels, minlength=len(names))
        for part in (train, val)
    )
    order = np.argsort(here, kind="stable")
    # The smallest class that has training images, for the ratio below.
    fewest = next((row for row in order if here[row]), 0)
    most = order[-1]
    # If there are many classes, list only the smallest ones.
    listed = range(len(names)) if len(names) <= MAX_LISTED_CLASSES else order
    each = list_some(
        [f"{names[row]} {here[row]} + {there[row]}" for row in listed], MAX_LISTED_CLASSES
    )
    notes = {"classes": f"{each} (training + held out)"}
    if here[most] >= UNBALANCED_RATIO * here[fewest] and not balanced and not several:
        notes["balance"] = (
            f"{names[most]} has {here[most] / here[fewest]:.0f} times as many images as "
            f"{names[fewest]}: data.balance=true draws all classes equally often"
        )
    return notes


def photos(
    recipe: Recipe,
    before: Before,
    train: EncodedPhotos,
    val: EncodedPhotos | None,
    names: Sequence[str],
    holdout: str,
    notes: Mapping[str, str],
) -> Datasets:
    """Create a data set of photos.

    Tiny images are decoded immediately if they need at most `IN_MEMORY_BYTES`, except with
    augment.crop=resized. All other images are decoded each time that they are read.

    Args:
        recipe: the recipe.
        before: the split of an earlier run, if any.
        train: training images, or all images without a separate validation set.
        val: the data set's own validation images. If None, or with data.fold, the validation
            images are drawn from `train` instead.
        names: names of the classes or values.
        holdout: description of `val` for the user.
        notes: notes for a run's banner.

    Raises:
        SetupError: the images cannot be read or divided.
    """
    table = None
    is_divided = False
    own_val = val
    val = train if own_val is None else own_val
    if own_val is None or recipe.data.fold:
        strata = list_strata(recipe, train.labels)
        chosen, described = hold_out(train.list_names(), strata, recipe, before, train.root)
        is_divided = not chosen.all()
        if own_val is None:
            holdout = described
        elif is_divided:
            holdout = add_unused(described, holdout, len(own_val))
            # The note "test" says that the test part chooses the best epoch, but now the fold does.
            notes = {title: note for title, note in notes.items() if title != "test"}
            notes["fold"] = (
                f"data.fold leaves {len(own_val):,} images of the validation split unused"
            )
        if is_divided:
            val = train.part(np.flatnonzero(chosen))
            train = train.part(np.flatnonzero(~chosen))
    if recipe.data.fraction < 1:
        train = train.part(keep_fraction(recipe, train.labels, train.list_names()))
    if is_divided:
        table = partial(holdout_table, train, val, names)
    train.pixel_range = val.pixel_range = recipe_pixel_range(recipe.data)
    values = PixelValues(train.pixel_range)
    channels, size, shape = image_shape(recipe, header_shapes(train, values, recipe.data.channels))
    values.check(channels)
    if tasks.find_task_class(recipe).reads == "values":
        counts = {}
    else:
        counts = class_counts(train, val, names, recipe.data.balance)
    bytes_needed = (len(train) + len(val)) * math.prod((*sides(size), channels))
    tiny = (
        max(sides(size)) <= TINY
        and bytes_needed <= IN_MEMORY_BYTES
        and recipe.augment.crop != "resized"
        and recipe.data.train_size is None
        and recipe.data.resize is None
    )
    mean, std = (statistics(known, channels) for known in IMAGENET)
    measured = {}
    if channels not in (1, 3) and (recipe.data.mean is None or recipe.data.std is None):
        mean, std, looked = measured_photos(train, size, channels, recipe.data)
        measured = {
            "measured": f"data.mean and data.std, over {looked:,} of {len(train):,} training images"
        }
    return Datasets(
        name=recipe.data.name,
        train=decoded(train, size, channels, recipe, evaluated=False) if tiny else train,
        val=decoded(val, size, channels, recipe, evaluated=True) if tiny else val,
        classes=tuple(names),
        channels=channels,
        image_size=size,
        mean=mean,
        std=std,
        holdout=holdout,
        notes={**shape, **values.notes(), **measured, **counts, **notes},
        sources=(train, val),
        holdout_table=table,
    )


def header_shapes(
    folder: EncodedPhotos,
    values: PixelValues,
    channels: int | None,
) -> list[Shape]:
    """Return (channels, height, width) of some images, from their headers if possible.

    Images that `read_stack` reads are decoded. Other images are decoded only if `values` needs
    their pixels.

    Args:
        folder: the images.
        values: collector to which this function adds the values of pixels that are not bytes.
        channels: the recipe's data.channels.
    """
    shapes = []
    indices = np.linspace(0, len(folder) - 1, min(MAX_HEADERS, len(folder)))
    for index in indices.astype(int):
        # Skip images that cannot be read: training reports them.
        with suppress(Exception), warnings.catch_warnings(action="ignore"):
            address = folder.address(index)
            where = folder.where(int(index))
            with open_header(address) as file:
                stack = is_stack(file.read(6), channels)
                file.seek(0)
                with suppress(UnidentifiedImageError):
                    if not stack:
                        with Image.open(file, formats=list_formats()) as image:
                            if image.format == "TIFF":
                                choose_page(image)
                            values.add(image, where)
                            shapes.append(shape_of(image))
                            continue
            pixels, kind, _ = read_stack(read_encoded(address), None)
            shapes.append((pixels.shape[2], *pixels.shape[:2]))
            values.channels[pixels.shape[2]].append(where)
            values.seen(kind, partial(np.asarray, pixels), where)
    return shapes


def shape_of(image: Image.Image) -> Shape:
    return (1 if image.mode in GRAY else 3), image.height, image.width


def image_shape(recipe: Recipe, shapes: list[Shape]) -> tuple[int, ImageSize, dict[str, str]]:
    """Choose the number of channels and the size of the model's images.

    The recipe's values are used if they are set. Otherwise, images become 3 x 224 x 224, with two
    exceptions:

    - If all images in `shapes` are square and have the same size below 224, they keep this size.
      This does not apply with `model.weights`, or to a torchvision model with `model.init_from`.
    - If all images in `shapes` are gray, they stay gray. This does not apply with `model.weights`,
      with `model.init_from`, or to a torchvision model, which was designed for 3 channels.

    Args:
        recipe: the recipe.
        shapes: shapes of some of the images.

    Returns:
        (channels, size, notes): the number of channels, the size, and a note about the choice for
        a run's banner.
    """
    data = recipe.data
    model = recipe.model
    sizes = {shape[1:] for shape in shapes}
    height = width = PHOTO_SIDE
    if len(sizes) == 1:
        ((height, width),) = sizes
    torchvisions = model.name in torchvision_classifiers()
    started = model.init_from is not None
    small = (
        height == width < PHOTO_SIDE and model.weights is None and not (started and torchvisions)
    )
    channel_counts = {shape[0] for shape in shapes}
    gray = channel_counts == {1}
    coloured = torchvisions or started or model.weights is not None
    channels = data.channels or (1 if gray and not coloured else 3)
    size = typed_size(data.image_size) or (height if small else PHOTO_SIDE)
    if (data.image_size and data.channels) or not shapes:
        return channels, size, {}
    several = channel_counts - {1, 3}
    if several:
        kind = f"of {'/'.join(map(str, sorted(several)))} channels"
    else:
        kind = "gray" if gray else "in colour"
    seen = f"{len(shapes)} looked at are {kind}, "
    seen += f"{height} x {width}" if len(sizes) == 1 else "of several sizes"
    keys = [f"data.{key}=" for key in ("channels", "image_size") if getattr(data, key) is None]
    advice = f"{' and '.join(keys)} choose{'s' if len(keys) == 1 else ''} otherwise"
    return channels, size, {"images": f"become {channels} x {in_pixels(size)} ({seen}); {advice}"}


def measured_photos(
    folder: EncodedPhotos, size: ImageSize, channels: int, data: DataRecipe
) -> tuple[Numbers, Numbers, int]:
    """Measure mean and standard deviation of each channel over images prepared for evaluation.

    Pixel values are counted as integers, so that every rank computes exactly the same result.

    Returns:
        (mean, std, looked): mean and standard deviation of each channel, and the number of measured
        images.

    Raises:
        SetupError: no image can be read.
    """
    counts = np.zeros((channels, 256), np.int64)
    looked = 0
    failed = ("", "")
    count = min(MAX_MEASURED_IMAGES, len(folder))
    for index in np.linspace(0, len(folder) - 1, count).astype(int).tolist():
        try:
            picture = folder.open(index, channels)[0]
            shorter = typed_size(data.resize)
            image = prepare_for_evaluation(picture, size, shorter, data.interpolation).numpy()
            for channel, pixels in enumerate(image):
                counts[channel] += np.bincount(pixels.ravel(), minlength=256)
            looked += 1
        except Exception as error:
            # Decoders can raise any exception.
            failed = folder.where(index), describe_failure(error)
    if not looked:
        raise unreadable([failed], len(folder))
    values = np.arange(256) / 255
    shares = counts / counts.sum(1, keepdims=True)
    mean = shares @ values
    std = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(1)).clip(1e-3)
    return tuple(mean.tolist()), tuple(std.tolist()), looked


def statistics(known: Sequence[float], channels: int) -> Numbers:
    """Convert the mean or standard deviation of pixels to another number of channels.

    A single value is repeated for 3 channels, and 3 values are averaged with the weights `LUMA` for
    one channel. For any other number of channels, the values are returned unchanged.

    Args:
        known: the statistic of each original channel.
        channels: number of channels after the conversion.
    """
    if len(known) == channels or channels not in (1, 3):
        return tuple(known)
    if channels == 3:
        return tuple(known) * 3
    return (sum(part * weight for part, weight in zip(known, LUMA, strict=True)),)


def decoded(
    folder: EncodedPhotos, size: ImageSize, channels: int, recipe: Recipe, evaluated: bool
) -> ImageSet:
    """Decode all images of a folder into memory.

    With data.on_error=skip, an unreadable validation image is left out, and an unreadable training
    image is replaced by the next readable one, as in loader workers.

    Args:
        folder: the images.
        size: size of the result in pixels.
        channels: number of channels of the result.
        recipe: the recipe.
        evaluated: whether these are validation images.

    Raises:
        SetupError: an image cannot be read and data.on_error=stop; no validation image can be read;
            or none of `NEIGHBOURS` consecutive training images can be read.
    """
    images = torch.empty(len(folder), *sides(size), channels, dtype=torch.uint8)
    failures = {}
    # Several threads would be slower: with small images, they compete for the interpreter lock.
    for index in range(len(folder)):
        try:
            picture = folder.open(index, channels)[0]
            image = prepare_for_evaluation(picture, size, interpolation=recipe.data.interpolation)
            images[index] = image.permute(1, 2, 0)
        except Exception as error:
            # Decoders can raise any exception.
            failures[index] = describe_failure(error)
    named = tuple((folder.where(index), why) for index, why in failures.items())
    if named and recipe.data.on_error == "stop":
        raise unreadable(named, len(folder))
    rows = np.arange(len(folder))
    if evaluated:
        rows = np.delete(rows, list(failures))
    else:
        for index in failures:
            rows[index] = -1
            for step in range(1, NEIGHBOURS):
                other = (index + step) % len(folder)
                if other not in failures:
                    rows[index] = other
                    break
    if not len(rows) or rows.min() < 0:
        raise SetupError(
            f"{folder.root}: hardly any image can be read, the first is {named[0][0]} "
            f"({named[0][1]})"
        )
    pixels = images[rows] if failures else images
    labels = torch.as_tensor(folder.labels)[rows]
    where = lambda index: folder.where(int(rows[index]))  # noqa: E731
    return ImageSet(pixels.permute(0, 3, 1, 2), labels, failures=named, where=where)


def unreadable(failures: Sequence[tuple[str, str]], count: int) -> SetupError:
    """Create the error that ends a run because of unreadable images.

    Args:
        failures: (path, reason) of each unreadable image.
        count: number of all images.
    """
    (where, why), *others = failures
    advice = "remove it or set data.on_error=skip"
    if others:
        shown = list_some([f"{path} ({reason})" for path, reason in others], MAX_LISTED_FAILURES)
        more = f", nor can {len(others):,} more of {count:,}: {shown}"
        advice = "remove them or set data.on_error=skip, which lists them in skipped.csv"
    return SetupError(f"{where} cannot be read ({why}){more if others else ''}; {advice}")

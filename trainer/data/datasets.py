"""Data sets by name, as the recipe's task wants them."""

from __future__ import annotations

import copy
import gzip
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer import tasks
from trainer.data import sampling
from trainer.data.archives.opening import SUFFIXES, open_archives, packed_or_remote
from trainer.data.downloads import PUBLISHED, load_published
from trainer.data.folders.label_tables import open_table
from trainer.data.folders.layout import NOTHING_BEFORE, Before
from trainer.data.folders.photo_folders import open_folder, statistics
from trainer.data.registered import UserItems, in_memory, open_registered, registered
from trainer.data.sets import Datasets, ImageSet, TensorSet, TensorSpec
from trainer.data.tensors import as_targets
from trainer.errors import RecipeError, SetupError
from trainer.recipe import DataRecipe, Recipe, differing
from trainer.recipe.image_sizes import ImageSize, sides, typed_size
from trainer.recipe.known_names import DATASETS, OWN_PHOTOS, WITHOUT_FOLDER

POOL_IMAGES, POOL_BYTES = 256, 2**26  # distinct images behind a synthetic set
STAND_IN_STEPS = 20
NO_FOLDER = "not a folder on this machine; type data.root=FOLDER of one that is"
MOVING = ("crop", "hflip", "auto")  # augmentation that moves pixels


def open_datasets(recipe: Recipe, before: Before = NOTHING_BEFORE) -> Datasets:
    """Find, and where allowed download, what `recipe.data` names. Needs no process group: every rank calls it.

    `before` is the split of an earlier part of the run, where the data set has none of its own.

    Raises:
        RecipeError: there is no such data set, or it does not fit the recipe.
        SetupError: its files are not here, or cannot be read.
    """
    tasks.kind(recipe)  # refuses an unknown task before anything is opened
    return _for_task(recipe, _opened(recipe, before))


def _for_task(recipe: Recipe, data: Datasets) -> Datasets:
    """With targets as the recipe's task wants them."""
    kind, name = tasks.kind(recipe), f"data.name={recipe.data.name}"

    def checked(part: Any) -> Any:
        if isinstance(part, UserItems):  # checks each target itself
            return part
        try:
            labels = kind.checked(as_targets(part.labels), data.classes)
        except ValueError as error:
            raise RecipeError(f"{name}, task.name={recipe.task.name}: {error}") from None
        if isinstance(part, ImageSet | TensorSet):
            return replace(part, labels=labels)
        part = copy.copy(part)
        part.labels = labels.numpy()
        return part

    train, val = checked(data.train), checked(data.val)
    spec = data.targets if isinstance(train, UserItems) else TensorSpec.of(torch.as_tensor(train.labels))
    if recipe.data.balance and (kind.reads != "class" or isinstance(train, UserItems) or spec.shape):
        unread = isinstance(train, UserItems) and kind.reads == "class"
        why = "does not have its classes without reading all images" if unread else "has not one class an image"
        raise RecipeError(f"data.balance=true draws classes equally often, and {name} {why}")
    data = replace(data, train=train, val=val, targets=spec)
    _check_augmentation(recipe, data)
    return _normalised(recipe.data, data)


def _normalised(recipe: DataRecipe, data: Datasets) -> Datasets:
    """With the recipe's mean and standard deviation, where it has them."""
    if recipe.mean is None and recipe.std is None:
        return data
    if data.plain:
        key = "mean" if recipe.mean is not None else "std"
        raise RecipeError(f"data.{key} is for images, and the inputs of data.name={recipe.name} are {data.plain}")
    mean, std = (
        known if wanted is None else statistics(tuple(wanted), tuple(wanted), data.channels)[0]
        for known, wanted in ((data.mean, recipe.mean), (data.std, recipe.std))
    )
    return replace(data, mean=mean, std=std)


def _check_augmentation(recipe: Recipe, data: Datasets) -> None:
    """Refuse what moves or mixes pixels where inputs are no images, or pixels have targets; and what does nothing."""
    if recipe.augment.alternate and not recipe.augment.hflip:
        raise RecipeError(
            "augment.hflip=0 leaves nothing to alternate: set augment.alternate=false or augment.hflip=0.5"
        )
    keys: tuple[str, ...] = MOVING
    name = f"data.name={recipe.data.name}"
    if data.plain:
        keys = (*MOVING, "mixup", "cutmix", "erase")
        why = f"is for images, and the inputs of {name} are {data.plain}"
    elif len(data.targets.shape) > 1:
        shape = " x ".join(map(str, data.targets.shape))
        why = f"moves pixels, and the targets of {name}, of {shape}, would not move with them"
    elif data.channels not in (1, 3) and recipe.augment.auto != "none":
        why = f"changes colours, and images have {data.channels} channels"
        raise RecipeError(f"augment.auto={recipe.augment.auto} {why}: set augment.auto=none")
    else:
        return
    changed = differing(Recipe(), recipe)
    for key in (key for key in (f"augment.{name}" for name in keys) if key in changed):
        default, value = changed[key]
        raise RecipeError(f"{key}={value} {why}: set {key}={default}")


def _opened(recipe: Recipe, before: Before) -> Datasets:
    data = recipe.data
    if data.labels is not None and data.name != "imagefolder":
        raise RecipeError(f"data.labels={data.labels} is a table of a folder's images: use data.name=imagefolder")
    for key in ("image_column", "label_column"):
        if getattr(data, key) is not None and data.labels is None:
            raise RecipeError(f"data.{key} names a column of a table of labels: add data.labels=FILE.csv")
    if data.name != "shards" and data.root is not None and not Path(data.root).expanduser().is_dir():
        if data.name == "imagefolder" and data.root.endswith(SUFFIXES):
            raise SetupError(f"data.root={data.root} is no folder but shards of images: add data.name=shards")
        raise SetupError(f"data.root={data.root} is {packed_or_remote(data.root) or NO_FOLDER}")
    if before.test and (data.name not in OWN_PHOTOS or data.root is None):
        raise RecipeError(f"split=test: data.name={data.name} has no test part beside its held-out one: leave it out")
    if data.name in registered:
        return open_registered(recipe)
    if data.name in PUBLISHED:
        known = PUBLISHED[data.name]
        train, val, classes = load_published(data)
        return in_memory(data, train, val, classes, (known.mean, known.std), "torchvision's test images")
    if data.name in WITHOUT_FOLDER and data.root is not None:
        raise RecipeError(
            f"data.name={data.name} comes with this program and reads no folder, so data.root={data.root} would not be "
            f"used: to train on the photos there, type recipe=finetune, or data.name=imagefolder"
        )
    if data.name == "digits":
        return digits(data)
    if data.name == "synthetic":
        return synthetic(recipe, data.samples, typed_size(data.image_size) or 32, recipe.model.num_classes or 10)
    if data.name in OWN_PHOTOS and data.root is None and data.missing == "synthetic":
        samples = max(data.samples, STAND_IN_STEPS * recipe.batch_size)
        return synthetic(recipe, samples, typed_size(data.image_size) or 224, recipe.model.num_classes or 1000)
    if data.name == "imagefolder":
        return open_folder(recipe, before) if data.labels is None else open_table(recipe, before)
    if data.name == "shards":
        return open_archives(recipe, before)
    raise RecipeError(
        f"data.name={data.name} is not a data set; known: {', '.join([*DATASETS, *registered])} "
        "(your own: register_dataset, or plugin=my_module)"
    )


def digits(data: DataRecipe) -> Datasets:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels. Every fifth, starting with the first, is held out."""
    # Read from scikit-learn's file: importing scikit-learn takes a second, the file a fiftieth of one.
    package = find_spec("sklearn")
    places = (package.submodule_search_locations if package else None) or [""]
    path = Path(places[0], "datasets", "data", "digits.csv.gz")
    if not path.is_file():
        raise SetupError("data.name=digits needs scikit-learn's copy of the images: pip install scikit-learn")
    with gzip.open(path, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.int64)
    pixels = np.rint(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    images, labels = torch.from_numpy(pixels), torch.from_numpy(table[:, 64].copy())
    held_out = torch.arange(len(labels)) % 5 == 0
    train, val = (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])
    classes = tuple(str(digit) for digit in range(10))
    return in_memory(data, train, val, classes, ((0.3053,), (0.3760,)), "every fifth image (index % 5 == 0)")


def synthetic(recipe: Recipe, samples: int, size: ImageSize, classes: int) -> Datasets:
    """Random images of a size and fixed labels."""
    channels = recipe.data.channels or 3
    rows = min(POOL_IMAGES, max(1, POOL_BYTES // math.prod((*sides(size), channels))))

    def make(split: int, length: int) -> ImageSet:
        key = int(sampling.hashed(recipe.seed, 0, split, sampling.POOL)[0])
        count = min(rows, length)
        stream = np.random.Generator(np.random.Philox(key=key))
        pixels = stream.integers(0, 256, (count, channels, *sides(size)), dtype=np.uint8)
        return ImageSet(torch.from_numpy(pixels), torch.arange(count) % classes, length)

    return Datasets(
        name=recipe.data.name,
        train=make(0, samples),
        val=make(1, recipe.data.val_samples),
        classes=tuple(str(label) for label in range(classes)),
        channels=channels,
        image_size=size,
        mean=(0.5,) * channels,
        std=(0.289,) * channels,  # of a uniform distribution
        synthetic=True,
        holdout="synthetic images",
    )

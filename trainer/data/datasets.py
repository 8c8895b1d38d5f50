"""Open the data set that a recipe names, and check that its targets fit the recipe's task."""

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
from trainer.data.items import name_by_number
from trainer.data.registered import UserItems, build_in_memory, open_registered, registered
from trainer.data.sets import Datasets, ImageSet, TensorSet, TensorSpec
from trainer.data.tensors import as_targets
from trainer.data.transforms import build_transforms, check_transforms
from trainer.errors import RecipeError, SetupError
from trainer.recipe import AugmentRecipe, Recipe, compare_recipes
from trainer.recipe.image_sizes import ImageSize, check_resize, sides, typed_size
from trainer.recipe.known_names import DATASETS, OWN_PHOTOS, WITHOUT_FOLDER
from trainer.recipe.recipe_files import format_argument

# A synthetic data set repeats a pool of random images. The pool has at most POOL_IMAGES images, and
# at most POOL_BYTES bytes unless a single image is larger.
POOL_IMAGES = 256
POOL_BYTES = 2**26
# Minimum number of steps per epoch on synthetic images that stand in for missing photos.
STAND_IN_STEPS = 20
NO_FOLDER = "not a folder on this machine; type data.root=FOLDER of one that is"
# Options of the recipe's `augment` section that move pixels to other positions.
MOVING = ("crop", "hflip", "vflip", "auto", "transforms")


def open_datasets(recipe: Recipe, before: Before = NOTHING_BEFORE) -> Datasets:
    """Open the data set of `recipe.data`, or download it if data.download allows this.

    Every rank calls this function. No process group is needed.

    Args:
        recipe: the recipe.
        before: the split that an earlier run drew, for data sets without a split of their own, and
            whether to evaluate on the test part.

    Raises:
        RecipeError: there is no such data set, or it does not fit the recipe.
        SetupError: the files of the data set are missing, or cannot be read.
    """
    # Refuse an unknown task or transform before anything is opened.
    kind = tasks.find_task_class(recipe)
    build_transforms(recipe.augment)
    name = f"data.name={recipe.data.name}"
    data = _open(recipe, before)

    def check_targets(part: Any) -> Any:
        """Return the training or validation set with targets in the form of the task."""
        # `UserItems` checks each target when it is read.
        if isinstance(part, UserItems):
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

    train = check_targets(data.train)
    val = check_targets(data.val)
    has_items = isinstance(train, UserItems)
    spec = data.targets if has_items else TensorSpec.of(torch.as_tensor(train.labels))
    if recipe.data.balance and (kind.reads != "class" or has_items or spec.shape):
        why = "does not have one class per image"
        if has_items and kind.reads == "class":
            why = "does not say its classes unless all images are read"
        raise RecipeError(f"data.balance=true draws classes equally often, but {name} {why}")
    data = replace(data, train=train, val=val, targets=spec)
    _check_augmentation(recipe, data)
    scales: dict[str, Any] = {}
    for key in ("mean", "std"):
        values = getattr(recipe.data, key)
        if values is None:
            continue
        if data.plain:
            raise RecipeError(
                f"data.{key} is for images, and the inputs of {name} are {data.plain}: remove it"
            )
        scales[key] = statistics(values, data.channels)
    return replace(data, **scales, **_choose_sizes(recipe, data))


def _choose_sizes(recipe: Recipe, data: Datasets) -> dict[str, Any]:
    """Return the fields of `Datasets` that say how photos are resized.

    Raises:
        RecipeError: the samples are not photos, or data.resize does not fit their size.
    """
    # Synthetic images have the sizes that photos would have.
    for key in ("train_size", "resize"):
        value = getattr(recipe.data, key)
        if value is not None and (data.plain or (data.is_in_memory and not data.synthetic)):
            kind = f"inputs are {data.plain}" if data.plain else "images are in memory"
            raise RecipeError(
                f"{format_argument(f'data.{key}', value)} is for photos that are resized one by "
                f"one, and the {kind} with data.name={recipe.data.name}: set data.{key}=null"
            )
    resize = typed_size(recipe.data.resize)
    if resize:
        check_resize(resize, data.image_size)
    train_size = typed_size(recipe.data.train_size)
    if train_size == data.image_size:
        train_size = None
    return {
        "train_size": train_size,
        "resize": resize,
        "interpolation": recipe.data.interpolation,
    }


def _check_augmentation(recipe: Recipe, data: Datasets) -> None:
    """Refuse augmentation that does not fit the inputs and targets, or has no effect.

    Inputs that are not images cannot be augmented. If a target has several dimensions, such as a
    mask, it would not move with the pixels, so operations that move pixels are refused.
    """
    repeats = recipe.augment.repeats
    is_varied = recipe.augment != AugmentRecipe(repeats=repeats)
    # A user's own data set may vary its items itself.
    if repeats > 1 and not is_varied and not isinstance(data.train, UserItems):
        raise RecipeError(
            f"augment.repeats={repeats} repeats each image, and nothing varies its copies: set "
            "augment.repeats=1, or add augmentation, as in augment.hflip=0.5"
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
        why = f"changes colours, but images have {data.channels} channels"
        raise RecipeError(f"augment.auto={recipe.augment.auto} {why}: set augment.auto=none")
    else:
        size = typed_size(recipe.data.train_size) or data.image_size
        check_transforms(recipe.augment, data.channels, size)
        return
    changed = compare_recipes(Recipe(), recipe)
    for option in keys:
        key = f"augment.{option}"
        if key in changed:
            default, value = changed[key]
            raise RecipeError(
                f"{format_argument(key, value)} {why}: set {format_argument(key, default)}"
            )


def _open(recipe: Recipe, before: Before) -> Datasets:
    """Open the data set by its name, without checking its targets."""
    data = recipe.data
    # A run with data.fold does not validate on a data set's own validation split, so split=test can
    # evaluate on it.
    has_test = data.fold is not None and data.name != "synthetic"
    if data.name in OWN_PHOTOS:
        has_test = data.root is not None
    if before.test:
        recipe = recipe.replace(data__fold=None)
    if data.labels is not None and data.name != "imagefolder":
        raise RecipeError(
            f"data.labels={data.labels} is a table of a folder's images: use data.name=imagefolder"
        )
    # `open_archives` checks data.root itself.
    if data.name != "shards" and data.root is not None:
        is_folder = Path(data.root).expanduser().is_dir()
        if not is_folder and data.name == "imagefolder" and data.root.endswith(SUFFIXES):
            raise SetupError(
                f"data.root={data.root} is not a folder but shards of images: add data.name=shards"
            )
        if not is_folder:
            raise SetupError(f"data.root={data.root} is {packed_or_remote(data.root) or NO_FOLDER}")
    if before.test and not has_test:
        raise RecipeError(
            f"split=test: data.name={data.name} has no test split in addition to its held-out one: "
            "remove split=test"
        )
    if data.name in registered:
        return open_registered(recipe)
    if data.name in PUBLISHED:
        source = PUBLISHED[data.name]
        train, val, classes = load_published(data)
        return build_in_memory(
            recipe, train, val, classes, (source.mean, source.std), "torchvision's test images"
        )
    if data.name in WITHOUT_FOLDER and data.root is not None:
        raise RecipeError(
            f"data.name={data.name} comes with this program and reads no folder, so "
            f"data.root={data.root} would not be used: to train on the photos there, type "
            "recipe=finetune, or data.name=imagefolder"
        )
    if data.name == "digits":
        return load_digits(recipe)
    if data.name == "synthetic":
        return generate_synthetic(recipe, data.samples, 32, 10)
    if data.name in OWN_PHOTOS and data.root is None and data.missing == "synthetic":
        samples = max(data.samples, STAND_IN_STEPS * recipe.batch_size)
        return generate_synthetic(recipe, samples, 224, 1000)
    if data.name == "imagefolder":
        if data.labels is None:
            return open_folder(recipe, before)
        return open_table(recipe, before)
    if data.name == "shards":
        return open_archives(recipe, before)
    raise RecipeError(
        f"data.name={data.name} is not a data set; known: {', '.join([*DATASETS, *registered])} "
        "(your own: register_dataset, or plugin=my_module)"
    )


def load_digits(recipe: Recipe) -> Datasets:
    """Load scikit-learn's 1,797 handwritten digits of 8 x 8 pixels.

    Every fifth image, starting with the first one, is in the validation set.
    """
    # Read scikit-learn's file directly, which takes 20 ms. Importing scikit-learn takes a second.
    package = find_spec("sklearn")
    folders = (package.submodule_search_locations if package else None) or [""]
    path = Path(folders[0], "datasets", "data", "digits.csv.gz")
    if not path.is_file():
        raise SetupError(
            "data.name=digits needs scikit-learn's copy of the images: pip install scikit-learn"
        )
    with gzip.open(path, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.int64)
    # Scale the pixels, which are whole numbers from 0 to 16, to bytes.
    scaled = np.rint(table[:, :64] * (255 / 16))
    pixels = scaled.astype(np.uint8).reshape(-1, 1, 8, 8)
    images = torch.from_numpy(pixels)
    labels = torch.from_numpy(table[:, 64].copy())
    in_val = torch.arange(len(labels)) % 5 == 0
    train = (images[~in_val], labels[~in_val])
    val = (images[in_val], labels[in_val])
    known_statistics = ((0.3053,), (0.3760,))
    return build_in_memory(
        recipe,
        train,
        val,
        name_by_number(10),
        known_statistics,
        holdout="every fifth image (index % 5 == 0)",
    )


def generate_synthetic(
    recipe: Recipe,
    samples: int,
    size: ImageSize,
    classes: int,
) -> Datasets:
    """Generate random images with fixed labels.

    Args:
        recipe: the recipe.
        samples: number of training images.
        size: size of the images, unless the recipe sets one.
        classes: number of classes, unless the recipe sets one.
    """
    size = typed_size(recipe.data.image_size) or size
    classes = recipe.model.num_classes or classes
    channels = recipe.data.channels or 3
    image_bytes = math.prod((*sides(size), channels))
    rows = min(POOL_IMAGES, max(1, POOL_BYTES // image_bytes))

    def make(
        split: int,
        length: int,
        size: ImageSize,
    ) -> ImageSet:
        key = int(sampling.draw_bits(recipe.seed, 0, split, sampling.POOL)[0])
        count = min(rows, length)
        stream = np.random.Generator(np.random.Philox(key=key))
        pixels = stream.integers(0, 256, (count, channels, *sides(size)), dtype=np.uint8)
        return ImageSet(torch.from_numpy(pixels), torch.arange(count) % classes, length)

    return Datasets(
        name=recipe.data.name,
        train=make(0, samples, typed_size(recipe.data.train_size) or size),
        val=make(1, recipe.data.val_samples, size),
        classes=name_by_number(classes),
        channels=channels,
        image_size=size,
        mean=(0.5,) * channels,
        # Standard deviation of the uniform distribution, 1 / sqrt(12).
        std=(0.289,) * channels,
        synthetic=True,
        holdout="synthetic images",
    )

"""Data sets by name: the ones that come with the package, and the user's own."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as vision

from trainer.data import order
from trainer.data.downloads import PUBLISHED, load_published
from trainer.data.folders import IMAGENET, Shape, image_shape, open_folder, shape_of, statistics
from trainer.data.images import from_item, with_channels
from trainer.data.sets import Datasets, ImageSet, PhotoSource
from trainer.errors import RecipeError, SetupError
from trainer.recipe import DataRecipe, Recipe, nearest
from trainer.recipe.checks import DATASETS

POOL_IMAGES, POOL_BYTES = 256, 2**26  # distinct images behind a synthetic set
STAND_IN_STEPS = 20
ITEMS_LOOKED_AT = 16  # of a user's data set, to choose a size; each is made in full

Maker = Callable[[DataRecipe], Any]
_registered: dict[str, Maker] = {}


def register_dataset(name: str) -> Callable[[Maker], Maker]:
    """Make a data set known as `data.name=name`.

    The decorated function takes the recipe's `data` section and returns (train, val, class names) or a `Datasets`.
    train and val each are a pair (images (N, C, H, W) uint8 tensor, labels (N,) tensor), which is kept in memory, or
    any map-style torch data set of items (uint8 (C, H, W) tensor or Pillow image, int), which loader workers read: they
    import the module that defines it.

    Raises:
        RecipeError: the name is taken.
    """
    if name in _registered or name in DATASETS:
        raise RecipeError(f"register_dataset('{name}'): the name is taken; choose another")

    def keep(maker: Maker) -> Maker:
        _registered[name] = maker
        return maker

    return keep


def open_datasets(recipe: Recipe) -> Datasets:
    """Find, and where allowed download, what `recipe.data` names. Needs no process group: every rank calls it.

    Raises:
        RecipeError: there is no such data set, or it does not fit the recipe.
        SetupError: its files are not here, or cannot be read.
    """
    data = recipe.data
    if data.root is not None and not Path(data.root).expanduser().is_dir():
        raise SetupError(f"data.root={data.root} is not a folder on this machine; type data.root=FOLDER of one that is")
    if data.name in _registered:
        return _from_user(recipe, _registered[data.name](data))
    if data.name in PUBLISHED:
        known = PUBLISHED[data.name]
        train, val, classes = load_published(data)
        return _in_memory(data, train, val, classes, (known.mean, known.std), "torchvision's test images")
    if data.name == "digits":
        return digits(data)
    if data.name == "synthetic":
        return synthetic(recipe, data.samples, data.image_size or 32, recipe.model.num_classes or 10)
    if data.name == "imagefolder" and data.root is None and data.missing == "synthetic":
        samples = max(data.samples, STAND_IN_STEPS * recipe.batch_size)
        return synthetic(recipe, samples, data.image_size or 224, recipe.model.num_classes or 1000)
    if data.name == "imagefolder":
        return open_folder(recipe)
    known_names = [*DATASETS, *_registered]
    guess = nearest(data.name, known_names)
    hint = f"did you mean data.name={guess}? " if guess else ""
    raise RecipeError(f"data.name={data.name} is not a data set; {hint}known: {', '.join(known_names)}")


def digits(data: DataRecipe) -> Datasets:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels. Every fifth, starting with the first, is held out."""
    # Read where it lies: importing scikit-learn takes a second, its data file a fiftieth of one.
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
    return _in_memory(data, train, val, classes, ((0.3053,), (0.3760,)), "every fifth image (index % 5 == 0)")


def synthetic(recipe: Recipe, samples: int, size: int, classes: int) -> Datasets:
    """Random images of `size` x `size` and fixed labels: free to read, and to be learned by heart only."""
    channels = recipe.data.channels or 3
    rows = min(POOL_IMAGES, max(1, POOL_BYTES // (size * size * channels)))

    def make(split: int, length: int) -> ImageSet:
        key = int(order.hashed(recipe.seed, 0, split, order.POOL)[0])
        count = min(rows, length)
        stream = np.random.Generator(np.random.Philox(key=key))
        pixels = stream.integers(0, 256, (count, channels, size, size), dtype=np.uint8)
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
        split="synthetic images",
    )


class UserItems:
    """A user's map-style data set as a source of photos."""

    def __init__(self, items: Any, name: str, classes: int) -> None:
        self.items, self.name, self.classes = items, name, classes

    def __len__(self) -> int:
        return len(self.items)

    def where(self, index: int) -> str:
        return f"{self.name}: item {index}"

    def read(self, index: int, channels: int) -> tuple[Tensor, int]:
        image, label = from_item(self.items[index], channels)
        if not 0 <= label < self.classes:
            raise ValueError(f"its label is {label}, and there are {self.classes} class names")
        return image, label


def _from_user(recipe: Recipe, made: Any) -> Datasets:
    data = recipe.data
    if isinstance(made, Datasets):
        return made
    if not isinstance(made, tuple) or len(made) != 3:
        raise RecipeError(
            f"data.name={data.name}: its function must return (train, val, class names), not {type(made).__name__}"
        )
    *parts, names = made
    classes, split = tuple(str(name) for name in names), "the held-out part that its function returns"
    pairs = [
        isinstance(part, (tuple, list)) and len(part) == 2 and all(isinstance(x, Tensor) for x in part)
        for part in parts
    ]
    if all(pairs):
        for part in parts:
            _check_pair(data.name, part, len(classes))
        return _in_memory(data, parts[0], parts[1], _several(data, classes), _measured(parts[0][0]), split)
    sources: list[ImageSet | PhotoSource] = []
    for part, pair, role in zip(parts, pairs, ("training set", "held-out set"), strict=True):
        if pair:
            raise RecipeError(f"data.name={data.name}: train and val must both be pairs of tensors, or neither")
        if not hasattr(part, "__getitem__") or not hasattr(part, "__len__") or not len(part):
            raise RecipeError(
                f"data.name={data.name}: its {role} must have items and a length above 0, found {type(part).__name__}"
            )
        sources.append(UserItems(part, f"{data.name}, {role}", len(classes)))
    channels, size, notes = image_shape(recipe, _item_shapes(parts[0]))
    mean, std = statistics(*IMAGENET, channels)
    classes = _several(data, classes)
    return Datasets(data.name, sources[0], sources[1], classes, channels, size, mean, std, False, split, notes)


def _several(data: DataRecipe, classes: tuple[str, ...]) -> tuple[str, ...]:
    if len(classes) < 2:
        raise RecipeError(
            f"data.name={data.name}: its function gives {len(classes)} class names; a classifier tells at least 2 apart"
        )
    return classes


def _item_shapes(items: Any) -> list[Shape]:
    """(channels, height, width) of some of a user's items."""
    shapes: list[Shape] = []
    for index in range(0, len(items), max(1, len(items) // ITEMS_LOOKED_AT)):
        with suppress(Exception):  # what is wrong with an item is said where it is read
            image = items[index][0]
            shapes.append(shape_of(image) if isinstance(image, Image.Image) else tuple(image.shape))
    return shapes


def _check_pair(name: str, pair: Sequence[Tensor], classes: int) -> None:
    images, labels = pair
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] not in (1, 3):
        raise RecipeError(
            f"data.name={name}: images must be uint8 (N, 1 or 3, H, W), found {images.dtype} {tuple(images.shape)}"
        )
    if labels.shape != images.shape[:1] or labels.is_floating_point():
        raise RecipeError(
            f"data.name={name}: {len(images)} images need as many whole numbers as labels, "
            f"found {labels.dtype} {tuple(labels.shape)}"
        )
    if not len(labels) or int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise RecipeError(
            f"data.name={name}: labels must be 0 to {classes - 1}, one for each of the {classes} class names"
        )


def _measured(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, over at most 10,000 images."""
    pixels = images[:: max(1, len(images) // 10_000)].double() / 255
    mean, std = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3)).clamp_min(1e-3)
    return tuple(mean.tolist()), tuple(std.tolist())


def _in_memory(
    data: DataRecipe,
    train: Sequence[Tensor],
    val: Sequence[Tensor],
    classes: tuple[str, ...],
    known: tuple[tuple[float, ...], tuple[float, ...]],
    split: str,
) -> Datasets:
    """Bring images to the recipe's channels and size, once."""
    channels = data.channels or train[0].shape[1]
    height, width = train[0].shape[-2:]
    if data.image_size is None and height != width:
        raise RecipeError(
            f"data.name={data.name}: images of {height} x {width} are not square; "
            f"set data.image_size={max(height, width)}"
        )
    size = data.image_size or int(height)

    def made(pair: Sequence[Tensor]) -> ImageSet:
        images = with_channels(pair[0], channels)
        if images.shape[-2:] != (size, size):
            images = cast(Tensor, vision.resize(images, [size, size], antialias=True))
        return ImageSet(images, pair[1].to(torch.int64))

    mean, std = statistics(*known, channels)
    return Datasets(data.name, made(train), made(val), classes, channels, size, mean, std, False, split)

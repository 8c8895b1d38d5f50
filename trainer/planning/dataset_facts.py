"""What is known of a data set without reading its images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.data import open_datasets
from trainer.recipe import Recipe
from trainer.recipe.checks import DATASETS

# Training images, held-out images, classes, channels, pixels along a side.
PUBLISHED = {
    "mnist": (60_000, 10_000, 10, 1, 28),
    "fashion_mnist": (60_000, 10_000, 10, 1, 28),
    "cifar10": (50_000, 10_000, 10, 3, 32),
    "cifar100": (50_000, 10_000, 100, 3, 32),
}
IMAGENET = (1000, 3, 224)


@dataclass(frozen=True)
class DatasetFacts:
    """A data set's size and shape.

    Attributes:
        train, val: numbers of images; None where the folder is on another machine.
        classes: of the data, or of the recipe's model where that says so.
        note: how it is known.
    """

    train: int | None
    val: int | None
    classes: int
    channels: int
    size: int
    note: str


def dataset_facts(recipe: Recipe) -> DatasetFacts:
    """The recipe's images. Folders are counted, published sets have known sizes, and nothing is downloaded.

    Raises:
        RecipeError, SetupError: as training would, where that does not depend on this machine.
    """
    data, wanted = recipe.data, recipe.model.num_classes
    stands_in = data.name == "imagefolder" and data.root is None and data.missing == "synthetic"
    if data.name in PUBLISHED:
        train, val, classes, channels, size = PUBLISHED[data.name]
        return DatasetFacts(train, val, classes, data.channels or channels, data.image_size or size, "as published")
    if data.name == "synthetic" or stands_in:
        classes, channels, size = IMAGENET if stands_in else (10, 3, 32)
        shape = (data.channels or channels, data.image_size or size)
        if stands_in:  # a number of steps would be one of the stand-in's
            return DatasetFacts(None, None, wanted or classes, *shape, "data.root=FOLDER counts them")
        return DatasetFacts(data.samples, data.val_samples, wanted or classes, *shape, "synthetic")
    if data.name == "imagefolder" and data.root is not None and not Path(data.root).expanduser().is_dir():
        classes, channels, size = IMAGENET
        shape = (data.channels or channels, data.image_size or size)
        return DatasetFacts(None, None, wanted or classes, *shape, f"{data.root} is not on this machine")
    if data.name in DATASETS and data.name != "digits":  # a crop of photos: nothing is decoded to be kept
        recipe = recipe.replace(augment__crop="resized")
    found = open_datasets(recipe)
    return DatasetFacts(
        len(found.train), len(found.val), len(found.classes), found.channels, found.image_size, "counted here"
    )

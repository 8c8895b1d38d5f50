"""What is known of a data set without reading its images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from trainer import tasks
from trainer.data import Example, TensorSpec, open_datasets
from trainer.data.archives.opening import exist
from trainer.data.items import numbers
from trainer.data.sets import CLASS
from trainer.errors import RecipeError
from trainer.models.inputs import with_pretrained_input
from trainer.recipe import Recipe
from trainer.recipe.image_sizes import ImageSize, sides, typed_size
from trainer.recipe.known_names import DATASETS, OWN_PHOTOS
from trainer.tasks import Task
from trainer.training.initial_model import model_for

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
    """A data set's size and shape."""

    train: int | None  # images; None where the folder is on another machine
    val: int | None  # as `train`
    classes: int  # of the data, or of the recipe's model where that says so; or a regression's values
    channels: int
    size: ImageSize
    note: str  # how it is known
    targets: TensorSpec = CLASS  # of a sample
    plain: TensorSpec | None = None  # of a sample's inputs where they are no images

    def example(self, rows: int) -> Example:
        """What a micro-batch of so many samples looks like."""
        images = TensorSpec((self.channels, *sides(self.size)), torch.float32)
        return Example(rows, self.plain or images, self.targets, self.plain is None)

    def task(self, recipe: Recipe) -> Task:
        """The recipe's task; weights of classes change no figure of a plan."""
        return tasks.create(recipe.replace(loss__class_weights=None), numbers(self.classes))

    def model(self, recipe: Recipe, starting: bool) -> nn.Module:
        """The recipe's model on the CPU, with its starting weights or without."""
        task = self.task(recipe)
        return model_for(recipe, task, self.classes, self.channels, self.size, self.plain, starting)


def dataset_facts(recipe: Recipe) -> DatasetFacts:
    """The recipe's images; folders are counted, nothing is downloaded. Raises RecipeError, SetupError."""
    facts = _facts(with_pretrained_input(recipe))
    if facts.plain is not None or facts.targets != CLASS:
        return facts
    kind, label = tasks.kind(recipe), torch.zeros(1, dtype=torch.int64)
    if recipe.data.labels is not None and kind.reads != "class":  # a table that is not on this machine
        label = torch.zeros(1, facts.classes)
    try:
        example = kind.checked(label, numbers(facts.classes))
    except ValueError as error:
        raise RecipeError(f"data.name={recipe.data.name}, task.name={recipe.task.name}: {error}") from None
    return replace(facts, targets=TensorSpec.of(example))


def _facts(recipe: Recipe) -> DatasetFacts:
    data, wanted, typed = recipe.data, recipe.model.num_classes, typed_size(recipe.data.image_size)
    if data.name in PUBLISHED:
        train, val, classes, channels, size = PUBLISHED[data.name]
        return DatasetFacts(train, val, classes, data.channels or channels, typed or size, "as published")
    if data.name == "synthetic":
        shape = (data.channels or 3, typed or 32)
        return DatasetFacts(data.samples, data.val_samples, wanted or 10, *shape, "synthetic")
    is_here = exist if data.name == "shards" else lambda root: Path(root).expanduser().is_dir()
    stands_in = data.root is None and data.missing == "synthetic"  # a number of steps would be one of the stand-in's
    if data.name in OWN_PHOTOS and (stands_in or (data.root is not None and not is_here(str(data.root)))):
        classes, channels, size = IMAGENET
        if not stands_in and tasks.kind(recipe).reads == "values":
            classes = 1
        note = "data.root=FOLDER counts them" if stands_in else f"{data.root} is not on this machine"
        return DatasetFacts(None, None, wanted or classes, data.channels or channels, typed or size, note)
    if data.name in DATASETS and data.name != "digits":  # a crop of photos: nothing is decoded to be kept
        recipe = recipe.replace(augment__crop="resized")
    found = open_datasets(recipe)
    shape = (found.channels, found.image_size)
    counts = (len(found.train), len(found.val), len(found.classes))
    return DatasetFacts(*counts, *shape, "counted here", found.targets, found.plain)

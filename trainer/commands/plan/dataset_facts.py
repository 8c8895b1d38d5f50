"""Size and shape of a data set, determined without reading its images."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from trainer import tasks
from trainer.data import Example, TensorSpec, open_datasets
from trainer.data.archives.opening import shards_of
from trainer.data.items import name_by_number
from trainer.data.sets import CLASS
from trainer.errors import RecipeError, SetupError
from trainer.models.inputs import add_pretrained_input
from trainer.recipe import Recipe
from trainer.recipe.image_sizes import ImageSize, sides, typed_size
from trainer.recipe.known_names import DATASETS, OWN_PHOTOS
from trainer.training.initial_model import build_for_sizes

# For each published data set: the numbers of training images, validation images, classes and
# channels, and the side of an image in pixels.
PUBLISHED = {
    "mnist": (60_000, 10_000, 10, 1, 28),
    "fashion_mnist": (60_000, 10_000, 10, 1, 28),
    "cifar10": (50_000, 10_000, 10, 3, 32),
    "cifar100": (50_000, 10_000, 100, 3, 32),
}
# Assumptions about photos that are not on this machine, if the recipe does not state these numbers:
# number of classes, number of channels, and side of an image in pixels.
IMAGENET = (1000, 3, 224)


@dataclass(frozen=True)
class DatasetFacts:
    """Size and shape of a data set.

    Attributes:
        train: number of training images; None if the images are not on this machine.
        val: number of validation images; None if the images are not on this machine.
        classes: number of classes of the data or, if that is unknown, of the recipe's model; for
            a regression, the number of values.
        channels: number of channels of an image.
        size: side of a square image in pixels, or (height, width).
        note: phrase that says where the numbers come from, or why they are unknown.
        targets: shape and type of a sample's target.
        plain: shape and type of a sample's input; None if inputs are images.
        train_size: size of a training image; None if it is `size`.
    """

    train: int | None
    val: int | None
    classes: int
    channels: int
    size: ImageSize
    note: str
    targets: TensorSpec = CLASS
    plain: TensorSpec | None = None
    train_size: ImageSize | None = None

    def example(self, rows: int) -> Example:
        """Return the shapes and types of a batch of `rows` samples."""
        size = self.train_size or self.size
        images = TensorSpec((self.channels, *sides(size)), torch.float32)
        return Example(rows, self.plain or images, self.targets, self.plain is None)

    def task(self, recipe: Recipe) -> tasks.Task:
        """Create the recipe's task without class weights, which change no number of a plan."""
        return tasks.create_task(
            recipe.replace(loss__class_weights=None), name_by_number(self.classes)
        )

    def model(self, recipe: Recipe, starting: bool) -> nn.Module:
        """Build the recipe's model on torch's default device.

        If `starting` is true, the weights that the recipe starts from are loaded.
        """
        task = self.task(recipe)
        return build_for_sizes(
            recipe, task, self.channels, self.size, self.plain, starting, self.train_size
        )


def read_dataset_facts(recipe: Recipe) -> DatasetFacts:
    """Return size and shape of the recipe's data, without downloading anything.

    The sizes of some public data sets are in `PUBLISHED`. Images on this machine are counted.

    Raises:
        RecipeError: the task cannot use these targets.
        SetupError: the data cannot be read.
    """
    facts = _find_facts(add_pretrained_input(recipe))
    facts = replace(facts, train_size=typed_size(recipe.data.train_size))
    if facts.plain is not None or facts.targets != CLASS:
        return facts
    kind = tasks.find_task_class(recipe)
    label = torch.zeros(1, dtype=torch.int64)
    # A table of labels that is not on this machine is assumed to have one value per class.
    if recipe.data.labels is not None and kind.reads != "class":
        label = torch.zeros(1, facts.classes)
    try:
        example = kind.checked(label, name_by_number(facts.classes))
    except ValueError as error:
        raise RecipeError(
            f"data.name={recipe.data.name}, task.name={recipe.task.name}: {error}"
        ) from None
    return replace(facts, targets=TensorSpec.of(example))


def _find_facts(recipe: Recipe) -> DatasetFacts:
    data = recipe.data
    name = data.name
    model_classes = recipe.model.num_classes
    image_size = typed_size(data.image_size)
    if name in PUBLISHED:
        train, val, classes, channels, size = PUBLISHED[name]
        note = "as published"
        if data.fold:
            number, count = map(int, data.fold.split("/"))
            val = len(range(number - 1, train, count))
            train -= val
        if data.fraction < 1:
            train = round(train * data.fraction)
            note += f", about {data.fraction:g} of each class"
        return DatasetFacts(
            train, val, classes, data.channels or channels, image_size or size, note
        )
    if name == "synthetic":
        classes = model_classes or 10
        shape = (data.channels or 3, image_size or 32)
        return DatasetFacts(data.samples, data.val_samples, classes, *shape, "synthetic")
    # Training would replace the missing images by synthetic ones, so no number of images is known.
    stands_in = data.root is None and data.missing == "synthetic"
    note = ""
    if name in OWN_PHOTOS:
        if stands_in:
            note = "data.root=FOLDER counts them"
        elif data.root is not None and not _is_here(name, data.root):
            note = f"{data.root} is not on this machine"
    if note:
        classes, channels, size = IMAGENET
        if not stands_in and tasks.find_task_class(recipe).reads == "values":
            classes = 1
        shape = (data.channels or channels, image_size or size)
        return DatasetFacts(None, None, model_classes or classes, *shape, note)
    # A plan does not need the pixels of photos. With the crop "resized", opening a data set of
    # small photos does not decode all of them into memory.
    if name in DATASETS and name != "digits":
        recipe = recipe.replace(augment__crop="resized")
    datasets = open_datasets(recipe)
    return DatasetFacts(
        train=len(datasets.train),
        val=len(datasets.val),
        classes=len(datasets.classes),
        channels=datasets.channels,
        size=datasets.image_size,
        note="counted here",
        targets=datasets.targets,
        plain=datasets.plain,
    )


def _is_here(data_name: str, root: str) -> bool:
    if data_name != "shards":
        return Path(root).expanduser().is_dir()
    try:
        return bool(shards_of(root))
    except SetupError:
        return False

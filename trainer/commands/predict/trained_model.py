"""A trained model: a run's or torchvision's weights, its classes, how its images are prepared and which it has seen."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from trainer import recipe as recipes
from trainer.commands.trained import Preparation, Trained, task_without_loss
from trainer.data import Datasets
from trainer.data.folders.layout import layout_of, part_of
from trainer.data.folders.photo_folders import IMAGENET
from trainer.data.folders.scanning import LeftOut
from trainer.data.photos.photo_reader import shorter_side
from trainer.errors import RecipeError, SetupError
from trainer.models import torchvision_zoo
from trainer.models.zoo import build
from trainer.recipe import Recipe
from trainer.recipe.known_names import TIMM
from trainer.saving.files import portable
from trainer.tasks import Task


class TrainedOn:
    """The files that a run was trained on."""

    def __init__(self, root: Path, names: frozenset[str] | None) -> None:
        """`names` below the root, as split.csv has them; None: all below it."""
        self._roots = tuple({os.path.join(path(root), "") for path in (os.path.abspath, os.path.realpath)})
        self._names = names
        self._real: dict[str, str] = {}  # of the folders that were met

    def __contains__(self, path: str) -> bool:
        folder, name = os.path.split(os.path.abspath(path))
        if folder not in self._real:
            self._real[folder] = os.path.realpath(folder)
        for place in (os.path.join(folder, name), os.path.join(self._real[folder], name)):
            for root in self._roots:
                if place.startswith(root) and (self._names is None or portable(place[len(root) :]) in self._names):
                    return True
        return False


@dataclass(frozen=True)
class LabelModel:
    """A model that can label, and what it was made of."""

    recipe: Recipe
    task: Task
    model: nn.Module
    classes: tuple[str, ...]
    preparation: Preparation
    data: Datasets | None  # where a split of the data set is labelled
    seen: TrainedOn | None = None  # what it was trained on, where other images are labelled
    photos: tuple[str, ...] = ()  # those: files, folders, lists of paths


def from_checkpoint(
    path: Path, words: Sequence[str], photos: Sequence[str] = (), split: bool | None = None
) -> LabelModel:
    """The weights of a run or a checkpoint, with the preparation that they were evaluated with.

    `photos` are to be labelled beside those of data.root=, or a `split` of the run's data set; None: as the words say.
    Raises CheckpointError, RecipeError.
    """
    trained = Trained.read(path, words)
    recipe, photos = _with_photos(trained.recipe, words, photos)
    split = not photos if split is None else split
    data, facts = trained.data(recipe) if split else None, trained.facts
    if (facts.classes is not None and not facts.mean) or (data is not None and data.plain):
        raise RecipeError(f"{path} was trained on inputs other than images, but predict labels images")
    classes, how = trained.preparation() if data is None else (data.classes, Preparation.of(data))
    task = _task(recipe, classes)
    model = trained.model(task, len(classes), how.channels, how.image_size)
    names = classes + tuple(f"class {n}" for n in range(len(classes), recipe.model.num_classes or 0))
    seen = trained_on(path, trained.own) if data is None else None
    return LabelModel(recipe, task, model, names, how, data, seen, photos)


def _task(recipe: Recipe, names: Sequence[str]) -> Task:
    """The recipe's task for labelling. Raises RecipeError."""
    task = task_without_loss(recipe, names)
    if type(task).ranked is Task.ranked:
        task.ranked(torch.zeros(0))  # says so
    return task


def _with_photos(recipe: Recipe, words: Sequence[str], photos: Sequence[str]) -> tuple[Recipe, tuple[str, ...]]:
    """The files to label, with those of data.root=; none where they are a part of the recipe's data set."""
    if recipe.predict.split is not None:
        if photos:
            raise RecipeError(
                f"predict.split={recipe.predict.split} labels images of the run's own data set, and {photos[0]} is "
                "another image: leave out one of them"
            )
        return recipe, ()
    if any(word.startswith("data.root=") for word in words) and recipe.data.root is not None:
        photos = (recipe.data.root, *photos)
    return recipe.replace(data__root=photos[0]) if photos else recipe, tuple(photos)


def published(words: Sequence[str], photos: Sequence[str] = ()) -> LabelModel:
    """One of torchvision's models with the weights that it publishes."""
    recipe = recipes.load(None, *words)
    if recipe.predict.split is not None:
        raise RecipeError("predict.split names a part of a run's data set, so it needs a run: leave out model.name=")
    recipe, photos = _with_photos(recipe, words, photos)
    if recipe.model.weights is None or not photos:
        raise RecipeError(
            "predict needs a model and images: predict RUN photo.jpg, or without a run "
            "predict model.name=resnet50 model.weights=DEFAULT photo.jpg"
        )
    if recipe.model.name.startswith(TIMM):
        raise RecipeError(
            f"model.name={recipe.model.name}: predict takes a model of timm from a run of yours, as checkpoint=runs/x"
        )
    if recipe.model.name not in torchvision_zoo.names():
        build(recipe.model, 1000, 3, 224)  # says what is wrong with the name
    entry = torchvision_zoo.published(recipe.model)
    classes, preset = tuple(entry.meta["categories"]), entry.transforms()
    size = preset.crop_size[0]
    model = build(recipe.model, len(classes), 3, size)
    preparation = Preparation(size, shorter_side(size), 3, *IMAGENET, preset)
    return LabelModel(recipe, _task(recipe, classes), model, classes, preparation, None, photos=photos)


def trained_on(path: Path, recipe: Recipe) -> TrainedOn | None:
    """The training files of the run with weights at `path` and this recipe; None where they are not known.

    They are those of the split in its folder, or of folders with a training and a held-out part.
    """
    data = recipe.data
    if data.name != "imagefolder" or data.root is None:
        return None
    root = Path(data.root).expanduser()
    try:
        names = part_of(path, "train")
        if data.labels is not None:
            return None if names is None else TrainedOn(root, names)
        layout = layout_of(root, LeftOut())
    except SetupError:  # the photos are not there any more, or split.csv cannot be read
        return None
    return TrainedOn(layout.train, names) if names is not None or layout.held_out is not None else None

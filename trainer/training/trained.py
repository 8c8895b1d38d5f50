"""A trained model, read once for predict, evaluate, export and `load`: weights, recipe, task, classes, images."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, Field, ValidationError, model_validator
from torch import Tensor, nn

from trainer import recipe as recipes
from trainer import tasks
from trainer.data import Datasets, TensorSpec, open_datasets
from trainer.data.cache import as_stored
from trainer.data.folders.layout import Before, part_of
from trainer.data.folders.scanning import few
from trainer.data.photos.photo_reader import shorter_side, shorter_side_of
from trainer.errors import CheckpointError, RecipeError
from trainer.models.zoo import initialise
from trainer.recipe import Recipe
from trainer.recipe.field_types import LARGEST_SIDE, MOST_CHANNELS
from trainer.recipe.image_sizes import ImageSize, sides, typed_size
from trainer.recipe.known_names import WITHOUT_FOLDER
from trainer.recipe.loading import load_stored
from trainer.saving.run_names import run_folder
from trainer.saving.weights import read_metadata, read_weights
from trainer.tasks import Task
from trainer.tasks.classification import class_name
from trainer.training.initial_model import model_for

Side = Annotated[int, Field(ge=1, le=LARGEST_SIDE)]
LARGEST = 2**32  # bytes of one input
TRAINING = {  # read by nothing else
    "resume", "epochs", "max_steps", "accumulate", "optimizer", "schedule", "distill", "recompute", "ema", "stop",
    "save",
}  # fmt: skip
ANYWHERE = {"devices": "auto", "mode": "ddp", "shares": None}  # its devices were those of training


class WeightFacts(BaseModel):
    """What weights tell of their classes and inputs, within bounds: the file may be damaged, or anyone's. Older files
    tell less; where inputs are no images, `mean` and `std` are empty."""

    classes: Annotated[tuple[str, ...], Field(max_length=2**20)] | None = None
    mean: tuple[Annotated[float, Field(ge=-1e3, le=1e3, allow_inf_nan=False)], ...] = ()
    std: tuple[Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)], ...] = ()
    image_size: Annotated[int, Field(ge=0, le=LARGEST_SIDE)] | tuple[Side, Side] = 0
    shorter_side: Side | tuple[Side, Side] | None = None
    channels: int = 0
    inputs: tuple[str, tuple[Annotated[int, Field(gt=0)], ...]] | None = None

    @model_validator(mode="after")
    def _fits(self) -> WeightFacts:
        size, spec = self.image_size, self.spec
        if not isinstance(spec.dtype, torch.dtype) or spec.bytes > LARGEST:
            raise ValueError("inputs that no model has")
        if self.mean:
            both = zip(sides(size), sides(self.shorter_side or size), strict=True)
            crop = all(1 <= side <= before <= 2 * side for side, before in both)
            channels = 1 <= self.channels <= MOST_CHANNELS and len(self.mean) == len(self.std) == self.channels
            if not (crop and channels and spec.shape == (self.channels, *sides(size))):
                raise ValueError("images of several sizes or numbers of channels")
        return self

    @property
    def spec(self) -> TensorSpec:
        """Of one sample's input; of images that an older version wrote, what these are."""
        kind, shape = self.inputs or ("float32", (self.channels, *sides(self.image_size)))
        return TensorSpec(shape, getattr(torch, kind, None))  # type: ignore[arg-type]  # checked above

    def shorter(self, size: ImageSize) -> ImageSize:
        """The pixels that images of `size` are cut out of; older files do not tell."""
        if self.shorter_side == self.image_size:  # nothing was cut off
            return size
        return self.shorter_side if self.shorter_side and size == self.image_size else shorter_side(size)

    @classmethod
    def read(cls, path: Path, told: Mapping[str, str]) -> WeightFacts:
        """From the metadata of weights at `path`. Raises CheckpointError."""
        try:
            known = (f'"{key}":{told[key]}' for key in cls.model_fields if key in told)
            return cls.model_validate_json("{" + ",".join(known) + "}")
        except ValidationError:
            raise CheckpointError(f"{path} is damaged: its classes, images or inputs make no sense") from None


@dataclass(frozen=True)
class Preparation:
    """From a decoded image to a model's input, as in evaluation: resize, crop, normalise."""

    image_size: ImageSize
    shorter_side: ImageSize  # what it is resized to cover, a square by its shorter side, before the centre is cut out
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, data: Datasets) -> Preparation:
        return cls(data.image_size, shorter_side_of(data), data.channels, data.mean, data.std)


@dataclass(frozen=True)
class Trained:
    """The weights of a run folder (its last ones), a checkpoint or a file, with what they were trained as."""

    path: Path
    weights: dict[str, Tensor]
    metadata: dict[str, str]  # of their file
    own: Recipe  # as they were trained
    recipe: Recipe  # with the words of a command

    @classmethod
    def read(cls, path: Path, words: Sequence[str] = ()) -> Trained:
        """Raises CheckpointError: no weights, or no recipe with them; RecipeError: the words mean nothing."""
        for key in (word.partition("=")[0] for word in words):
            if key.partition(".")[0] in TRAINING:
                raise RecipeError(f"{key}= changes nothing once a model is trained: leave it out")
        weights, metadata = read_weights(path)
        own = written_recipe(path, metadata).to_dict() | ANYWHERE
        return cls(path, weights, metadata, recipes.load(own), recipes.load(own, *words))

    @cached_property
    def facts(self) -> WeightFacts:
        """By the file's metadata, else by that of its run's folder. Raises CheckpointError."""
        told, folder = self.metadata, run_folder(self.path)
        return WeightFacts.read(self.path, told if "classes" in told or folder is None else read_metadata(folder))

    def preparation(self) -> tuple[tuple[str, ...], Preparation]:
        """Names of the classes, and how images are prepared, by the facts alone. Raises CheckpointError."""
        facts = self.facts
        if facts.classes is None or not facts.mean:
            raise CheckpointError(f"{self.path} does not name its classes; give a run folder or its last.safetensors")
        size = typed_size(self.recipe.data.image_size) or facts.image_size
        return facts.classes, Preparation(size, facts.shorter(size), facts.channels, facts.mean, facts.std)

    def data(self, recipe: Recipe, test: bool = False) -> Datasets:
        """The data set of `recipe`, with the images held out that the run held out; or those of a `test` part.

        A split that the run made is in its folder, or drawn again from its seed. Of other images without a split, in
        another folder than the run's, all are held out. Raises CheckpointError.
        """
        elsewhere = recipe.data.root != self.own.data.root
        data = open_datasets(recipe, Before(part_of(self.path, "val"), elsewhere, test))
        known = tuple(map(class_name, self.facts.classes or data.classes))
        if known != data.classes:
            there, here = (f"{len(names)} classes ({few(names, 8)})" for names in (known, data.classes))
            raise CheckpointError(f"{self.path} was trained on {there}, and {data.holdout} holds {here}")
        return as_stored(data, recipe)

    def model(
        self, task: Task, names: int, channels: int, image_size: ImageSize, plain: TensorSpec | None = None
    ) -> nn.Module:
        """The model of `names` outputs with its weights, in evaluation mode on the CPU; `plain` are inputs that are no
        images. Raises CheckpointError."""
        model = model_for(self.recipe, task, names, channels, image_size, plain, starting=False)
        initialise(model, self.weights, str(self.path), whole=True)
        return model.eval()


def task_without_loss(recipe: Recipe, names: Sequence[str]) -> Task:
    """The recipe's task, which is asked for no loss."""
    return tasks.create(recipe.replace(loss={}, augment={}), names)


def written_recipe(path: Path, metadata: Mapping[str, str]) -> Recipe:
    """The recipe of weights: from their file, else from the run folder they lie in. Raises CheckpointError."""
    if "recipe" not in metadata:
        if (folder := run_folder(path)) is None:
            raise CheckpointError(f"{path} has no recipe with it; give a run folder, as runs/x")
        return recipes.load(str(folder / "recipe.yaml"))
    folder = run_folder(path, 1)
    try:
        written = load_stored(json.loads(metadata["recipe"]), str(folder / "recipe.yaml" if folder else path))
        # Weights tell no paths, their run's folder does; a damaged one is no matter where none is read.
        if written.data.name not in WITHOUT_FOLDER and folder is not None:
            data = recipes.load(str(folder / "recipe.yaml")).data
            written = written.replace(data__root=data.root, data__labels=data.labels, data__cache_dir=data.cache_dir)
    except (ValueError, TypeError, RecursionError) as error:  # a RecipeError too
        raise CheckpointError(f"{path} holds a recipe that cannot be used ({error})") from None
    return written

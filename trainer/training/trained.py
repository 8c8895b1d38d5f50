"""A trained model for predict, evaluate, export and `load`: weights, recipe, task and classes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from trainer.data.photos.photo_reader import compute_shorter_side, evaluation_shorter_side
from trainer.errors import CheckpointError, RecipeError
from trainer.models.zoo import load_weights
from trainer.processes.terminal import say
from trainer.recipe import Recipe
from trainer.recipe.field_types import LARGEST_SIDE, MOST_CHANNELS, Interpolation
from trainer.recipe.image_sizes import ImageSize, check_resize, sides, typed_size
from trainer.recipe.known_names import WITHOUT_FOLDER
from trainer.recipe.loading import load_stored
from trainer.recipe.text import list_some
from trainer.recipe.unused import describe_unused
from trainer.saving.checkpoint import is_checkpoint
from trainer.saving.run_names import find_run_folder
from trainer.saving.weights import read_metadata, read_weights
from trainer.tasks import Task
from trainer.tasks.classification import class_name
from trainer.training.initial_model import build_for_sizes

Side = Annotated[int, Field(ge=1, le=LARGEST_SIDE)]
SideOrZero = Annotated[int, Field(ge=0, le=LARGEST_SIDE)]
Length = Annotated[int, Field(gt=0)]
ClassNames = Annotated[tuple[str, ...], Field(max_length=2**20)]
Mean = Annotated[float, Field(ge=-1e3, le=1e3, allow_inf_nan=False)]
Std = Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)]
# Maximum number of bytes of one input. Metadata that describes larger inputs is refused as damaged.
LARGEST = 2**32
# Keys of the recipe that only training reads. Commands for a trained model refuse them as
# arguments.
TRAINING = {
    "resume",
    "epochs",
    "max_steps",
    "max_time",
    "evaluate",
    "verify",
    "accumulate",
    "optimizer",
    "schedule",
    "distill",
    "recompute",
    "ema",
    "stop",
    "save",
    "data.fold",
    "data.fraction",
    "data.train_size",
    "model.probe",
    "data.balance",
    "augment",
    "clip_grad_norm",
    "sync_bn",
    "ddp",
    "local_sgd",
    "model.freeze",
}
# Values that replace the devices and the mode of training, so that commands run on any machine.
ANYWHERE = {"devices": "auto", "mode": "ddp", "shares": None}


class WeightFacts(BaseModel):
    """Metadata of a file of weights: the classes and inputs of its model.

    The values are checked against bounds, because the file may be damaged, or come from an
    untrusted source. Older files have fewer values.

    Attributes:
        classes: Names of the classes or values. None if the file does not name them.
        mean: Mean of each channel. Empty if the inputs are not images.
        std: Standard deviation of each channel. Empty if the inputs are not images.
        image_size: Size of an image in pixels: one number for a square, or (height, width). If the
            inputs are not images, the size of their last dimension. 0 if the file does not contain
            it.
        shorter_side: Size that an image is resized to before `image_size` is cropped from it. None
            if the file does not contain it.
        interpolation: The recipe's data.interpolation.
        channels: Number of channels of an image.
        inputs: (name of the type, shape) of one input. None if the file does not contain them.
    """

    classes: ClassNames | None = None
    mean: tuple[Mean, ...] = ()
    std: tuple[Std, ...] = ()
    image_size: SideOrZero | tuple[Side, Side] = 0
    shorter_side: Side | tuple[Side, Side] | None = None
    interpolation: Interpolation = "bilinear"
    channels: int = 0
    inputs: tuple[str, tuple[Length, ...]] | None = None

    @model_validator(mode="after")
    def _check(self) -> WeightFacts:
        size = self.image_size
        spec = self.spec
        if not isinstance(spec.dtype, torch.dtype) or spec.bytes > LARGEST:
            raise ValueError("inputs that no model has")
        if self.mean:
            both = zip(sides(size), sides(self.shorter_side or size), strict=True)
            is_crop = all(1 <= side <= before <= 2 * side for side, before in both)
            has_channels = (
                1 <= self.channels <= MOST_CHANNELS
                and len(self.mean) == len(self.std) == self.channels
            )
            shape = self.channels, *sides(size)
            if not (is_crop and has_channels and spec.shape == shape):
                raise ValueError("images of several sizes or numbers of channels")
        return self

    @property
    def spec(self) -> TensorSpec:
        """Shape and type of one sample's input. Older files describe only images."""
        image_shape = self.channels, *sides(self.image_size)
        kind, shape = self.inputs or ("float32", image_shape)
        # The validator has refused names that are not types of torch.
        return TensorSpec(shape, getattr(torch, kind, None))  # type: ignore[arg-type]

    def shorter(self, size: ImageSize) -> ImageSize:
        """Return the size that an image is resized to before `size` is cropped from its center.

        If the metadata does not record that size, as in older files, the default is computed.
        """
        # Equal sizes mean that the run's evaluation resized images without cropping them.
        if self.shorter_side == self.image_size:
            return size
        if self.shorter_side and size == self.image_size:
            return self.shorter_side
        return compute_shorter_side(size)

    @classmethod
    def read(cls, path: Path, metadata: Mapping[str, str]) -> WeightFacts:
        """Parse the metadata of the weights at `path`.

        Raises:
            CheckpointError: The metadata is damaged.
        """
        try:
            fields = [f'"{key}":{metadata[key]}' for key in cls.model_fields if key in metadata]
            return cls.model_validate_json("{" + ",".join(fields) + "}")
        except ValidationError:
            raise CheckpointError(
                f"{path} is damaged: its classes, images or inputs make no sense"
            ) from None


@dataclass(frozen=True)
class Preparation:
    """Steps from a decoded image to a model's input, as in evaluation: resize, crop, normalize.

    Attributes:
        image_size: Size of the input in pixels.
        shorter_side: Size in pixels that the resized image just covers, before the center is
            cropped. If the size is one number, the shorter side of the resized image has this
            length.
        channels: Number of channels.
        mean: Mean of each channel.
        std: Standard deviation of each channel.
        interpolation: How images are resized: data.interpolation of a recipe.
    """

    image_size: ImageSize
    shorter_side: ImageSize
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"

    @classmethod
    def of(cls, data: Datasets) -> Preparation:
        return cls(
            data.image_size,
            evaluation_shorter_side(data),
            data.channels,
            data.mean,
            data.std,
            data.interpolation,
        )


@dataclass(frozen=True)
class Trained:
    """Trained weights, and the recipe of their run.

    Attributes:
        path: Path of a weights file, of a checkpoint, or of a run folder.
        weights: Parameters and buffers by their names in the user's model.
        metadata: Metadata of the file.
        own: Recipe of the run, in which the values of ANYWHERE replace devices, mode and shares.
        recipe: Recipe `own`, changed by the arguments of a command.
        file: Path of the weights that were read from the run folder `path`; None if `path` is a
            weights file or a checkpoint.
    """

    path: Path
    weights: dict[str, Tensor]
    metadata: dict[str, str]
    own: Recipe
    recipe: Recipe
    file: Path | None = None

    @classmethod
    def read(cls, path: Path, words: Sequence[str] = (), prefers_best: bool = True) -> Trained:
        """Read the weights at `path`, and their recipe with the arguments `words` of a command.

        Args:
            path: Run folder, checkpoint or weights file.
            words: Overrides of the run's recipe.
            prefers_best: Whether a run folder's best weights are read if it has any.

        Raises:
            CheckpointError: There are no weights, or no recipe with them.
            RecipeError: An argument is invalid or has no effect on a trained model.
        """
        for word in words:
            key = word.partition("=")[0]
            if not TRAINING.isdisjoint((key, key.partition(".")[0])):
                raise RecipeError(describe_unused(word, "a trained model"))
        file = None
        if not is_checkpoint(path):
            files = [path / "last.safetensors"]
            if prefers_best:
                files.insert(0, path / "best.safetensors")
            file = next(filter(Path.is_file, files), None)
        weights, metadata = read_weights(file or path)
        stored = read_recipe(path, metadata).replace(model__probe=False)
        own = stored.to_dict() | ANYWHERE
        own_recipe = recipes.load(own)
        recipe = recipes.load(own, *words)
        return cls(path, weights, metadata, own_recipe, recipe, file)

    def say_choice(self) -> None:
        """Print a line about the best weights of a run folder if they were chosen.

        The line has only what the file contains: older files lack the epoch and the metric.
        """
        if self.file is None or self.file.stem != "best":
            return
        metadata = self.metadata
        position = f"step {metadata.get('step', 'unknown')}"
        if "epoch" in metadata:
            position = f"epoch {metadata['epoch']} ({position})"
        best = "best weights"
        # The metric may be one of a plugin that this process has not loaded.
        with suppress(KeyError, ValueError, RecipeError):
            values = {json.loads(metadata["metric"]): float(metadata["value"])}
            plain = self.own.replace(loss={}, augment={})
            task = tasks.create_task(plain, self.facts.classes or ())
            best = f"best {task.text(values)}"
        say(f"{self.path}: {position}, {best}; checkpoint=last for the last")

    @cached_property
    def facts(self) -> WeightFacts:
        """Metadata of the file, or that of the run folder if the file does not name the classes.

        Raises:
            CheckpointError: The metadata is damaged.
        """
        metadata = self.metadata
        folder = find_run_folder(self.path)
        if "classes" not in metadata and folder:
            metadata = read_metadata(folder)
        return WeightFacts.read(self.path, metadata)

    def preparation(self) -> tuple[tuple[str, ...], Preparation]:
        """Return `(classes, preparation)`: the class names, and how images are prepared.

        Both come from the metadata and the recipe. The data is not opened.

        Raises:
            CheckpointError: The metadata does not name the classes, or the inputs are not images.
        """
        facts = self.facts
        if facts.classes is None or not facts.mean:
            raise CheckpointError(
                f"{self.path} does not name its classes; use a run folder or its last.safetensors"
            )
        typed = self.recipe.data
        size = typed_size(typed.image_size) or facts.image_size
        shorter = facts.shorter(size)
        # The metadata describes the run, and arguments of a command replace it.
        own_resize = self.own.data.resize
        resize = typed_size(typed.resize)
        if (typed.resize, size) != (own_resize, facts.image_size):
            if resize:
                check_resize(resize, size)
                shorter = resize
            elif own_resize:
                shorter = compute_shorter_side(size)
        interpolation: str = facts.interpolation
        if typed.interpolation != self.own.data.interpolation:
            interpolation = typed.interpolation
        return facts.classes, Preparation(
            size, shorter, facts.channels, facts.mean, facts.std, interpolation
        )

    def data(self, recipe: Recipe, test: bool = False) -> Datasets:
        """Open the data of `recipe`, with the validation split of the run or a `test` split.

        The split is read from the run folder, or drawn again from the seed of the run. If
        `data.root` is not that of the run, and its images are not split, all of them belong to the
        validation split, unless data.fold must be drawn again (see `hold_out`).

        Raises:
            CheckpointError: The data has other classes than the model.
        """
        is_elsewhere = recipe.data.root != self.own.data.root
        # No image is prepared as for training. With another seed, the validation split would have
        # images that the run trained on.
        recipe = recipe.replace(data__train_size=None, seed=self.own.seed)
        if recipe.data.name != self.own.data.name:
            recipe = recipe.replace(data__fold=None)
        data = open_datasets(recipe, Before(part_of(self.path, "val"), is_elsewhere, test))
        classes = tuple(map(class_name, self.facts.classes or data.classes))
        if classes != data.classes:
            raise CheckpointError(
                f"{self.path} was trained on {_describe_classes(classes)}, and {data.holdout} "
                f"holds {_describe_classes(data.classes)}: type data.root= of images of the former"
            )
        if self.facts.mean and recipe.data.mean is None:
            # Use the mean and standard deviation of the run. Measured again, they might be those of
            # other images, for example without data.fold.
            data = replace(data, mean=self.facts.mean)
        if self.facts.std and recipe.data.std is None:
            data = replace(data, std=self.facts.std)
        return as_stored(data, recipe)

    def model(
        self,
        task: Task,
        channels: int,
        image_size: ImageSize,
        plain: TensorSpec | None = None,
    ) -> nn.Module:
        """Return the model with its weights, in evaluation mode on the CPU.

        Args:
            task: The task, which names the classes or values.
            channels: Number of channels.
            image_size: Size of an image.
            plain: Shape and type of inputs that are not images.

        Raises:
            CheckpointError: The weights do not fit the model.
        """
        model = build_for_sizes(self.recipe, task, channels, image_size, plain, starting=False)
        load_weights(model, self.weights, str(self.path), whole=True)
        return model.eval()


def _describe_classes(names: Sequence[str]) -> str:
    return f"{len(names)} classes ({list_some(names, 8)})"


def create_task_without_loss(recipe: Recipe, names: Sequence[str]) -> Task:
    """Return the recipe's task for a caller that computes no loss and no metrics."""
    plain = recipe.replace(loss={}, augment={}, task={"name": recipe.task.name})
    return tasks.create_task(plain, names)


def read_recipe(path: Path, metadata: Mapping[str, str]) -> Recipe:
    """Return the recipe that is stored with weights: in their file, or else in their run folder.

    Raises:
        CheckpointError: There is no recipe, or it is invalid.
    """
    if "recipe" not in metadata:
        if (folder := find_run_folder(path)) is None:
            raise CheckpointError(f"{path} has no recipe with it; use a run folder, such as runs/x")
        return recipes.load(str(folder / "recipe.yaml"))
    folder = find_run_folder(path, 1)
    source = path if folder is None else folder / "recipe.yaml"
    try:
        recipe = load_stored(json.loads(metadata["recipe"]), str(source))
        # Files of weights contain no paths, but the recipe of the run folder does. The folder's
        # recipe is not read if the data has no path, so that a damaged recipe.yaml does no harm.
        if recipe.data.name not in WITHOUT_FOLDER and folder:
            data = recipes.load(str(folder / "recipe.yaml")).data
            recipe = recipe.replace(
                data__root=data.root, data__labels=data.labels, data__cache_dir=data.cache_dir
            )
    # RecipeError is a ValueError, so it is caught as well.
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} contains a recipe that cannot be used ({error})") from None
    return recipe

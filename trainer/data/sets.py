"""Types that `data` exchanges with other packages: batches, shares, and sets of images."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from trainer.data.photos.lazy_images import Picture
from trainer.data.sampling import Array, Span, compute_span
from trainer.recipe import Recipe
from trainer.recipe.image_sizes import ImageSize, sides
from trainer.recipe.shares import count_rows


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device.

    Attributes:
        inputs: (N, ...). Images are (N, C, H, W) float32, normalized, and channels_last in memory
            if the recipe asks for it. Empty on a share that needs no inputs.
        targets: (N, ...) in the form of the task: for example class indices (N,) int64, or float32
            soft targets under mixup and cutmix. Empty on a share that needs no targets.
        count: number of samples. The rows after them are padding (evaluation only).
        samples: indices of the first `count` rows in the validation set; None in training, or if
            they are unknown.
    """

    inputs: Tensor
    targets: Tensor
    count: int
    samples: Sequence[int] | None = None


class TensorSpec(NamedTuple):
    """Shape and type of the tensor of one sample.

    Attributes:
        shape: size of each dimension, without the batch dimension.
        dtype: type of the elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> str:
        """Return a JSON string such as '["float32", [3, 224, 224]]'."""
        return json.dumps([str(self.dtype).removeprefix("torch."), self.shape])

    @classmethod
    def of(cls, rows: Tensor) -> TensorSpec:
        """Return shape and type of one row of `rows`."""
        return cls(tuple(rows.shape[1:]), rows.dtype)


# Target of a sample in classification: one class index.
CLASS = TensorSpec((), torch.int64)


@dataclass(frozen=True)
class Example:
    """Shapes and types of a full micro-batch, known before the first micro-batch is read.

    Attributes:
        rows: samples of a full micro-batch.
        inputs: shape and type of a sample's inputs, as in `Batch`.
        targets: shape and type of a sample's targets, as in `Batch`.
        images: whether the inputs are images, which may be channels_last in memory.
        evaluated: shape and type of a sample's inputs in evaluation; None if they are `inputs`.
    """

    rows: int
    inputs: TensorSpec
    targets: TensorSpec = CLASS
    images: bool = True
    evaluated: TensorSpec | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a full micro-batch's inputs."""
        return (self.rows, *self.inputs.shape)

    def batch(
        self,
        device: torch.device,
        rows: int | None = None,
        channels_last: bool = False,
    ) -> Batch:
        """Return a micro-batch for trials and measurements, the same every time.

        Floating-point inputs are random numbers between 0 and 1, with which nearly all models work.
        Zeros would have a standard deviation of 0, and negative numbers have no square root. All
        other inputs, and the targets, are zeros. The strides are those of a real batch.

        Args:
            device: device of the tensors.
            rows: number of samples; by default that of a full micro-batch.
            channels_last: whether images are channels_last in memory.
        """
        count = self.rows if rows is None else rows
        inputs, targets = (
            torch.zeros(count, *spec.shape, dtype=spec.dtype, device=device)
            for spec in (self.inputs, self.targets)
        )
        if inputs.is_floating_point():
            generator = torch.Generator().manual_seed(0)
            inputs.copy_(torch.rand(inputs.shape, generator=generator))
        if self.images and inputs.dim() == 4 and (channels_last or inputs.shape[1] == 1):
            # With one channel, both memory formats are the same layout with different strides, and
            # torch.compile distinguishes strides.
            pixels = inputs.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format)
            inputs = pixels.permute(0, 3, 1, 2)
        return Batch(inputs, targets, count)


@dataclass(frozen=True)
class DataShare:
    """The part of the data that a rank reads.

    Attributes:
        index: number of this share, from 0.
        count: number of shares.
        inputs: whether this rank needs the images; in a pipeline, only the ranks of the first stage
            do, and those of the last stage if there is a teacher.
        targets: whether this rank needs the labels; in a pipeline, only the ranks of the last stage
            do.
        every_sample: if True, the share is a contiguous part of the epoch's permutation, and each
            of its samples is used once per epoch (local SGD, Hogwild). If False, it is a part of
            every global batch.
        counted: whether a rank with `inputs` counts unreadable images and reads validation images.
            False on the last stage of a pipeline that reads training images only for a teacher.
        numbers: proportions of all shares of a batch (`recipe.shares`); empty for equal shares.
    """

    index: int = 0
    count: int = 1
    inputs: bool = True
    targets: bool = True
    every_sample: bool = False
    counted: bool = True
    numbers: tuple[float, ...] = ()

    def count_rows(self, recipe: Recipe, accumulate: int | None = None) -> list[int]:
        """Return the number of images that each share has in a micro-batch.

        Args:
            recipe: the recipe of the run.
            accumulate: number of micro-batches per step; None for that of the recipe.
        """
        return count_rows(recipe, self.count, accumulate, self.numbers)

    def compute_span(self, recipe: Recipe, samples: int) -> Span:
        """Return the (start, stop) of this share in an epoch of `samples` samples.

        Only for shares with `every_sample`.
        """
        rows = self.count_rows(recipe) if self.numbers else ()
        return compute_span(samples, self.index, self.count, rows)


@dataclass(frozen=True)
class ImageSet:
    """Images in memory.

    Sample i is row i % rows, so that few images can stand for a large set.

    Attributes:
        images: (rows, C, H, W) uint8.
        labels: (rows, ...) in the form of the task, for example class indices (rows,) int64.
        length: number of samples; if None, there are as many samples as rows.
        failures: (path, reason) of the files that could not be read and were skipped or replaced.
        where: function that returns the path of a sample; None if the images did not come from
            files.
    """

    images: Tensor
    labels: Tensor
    length: int | None = None
    failures: tuple[tuple[str, str], ...] = ()
    where: Callable[[int], str] | None = None

    def __len__(self) -> int:
        return len(self.labels) if self.length is None else self.length


@dataclass(frozen=True)
class TensorSet:
    """Inputs in memory that are not images, such as sequences, tokens and volumes.

    The inputs reach the model unchanged.

    Attributes:
        inputs: (rows, ...) of any type.
        labels: (rows, ...) in the form of the task.
    """

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


class PhotoSource(Sized, Protocol):
    """Images that loader workers read one at a time.

    A source must be picklable, and small when pickled.
    """

    def read(self, index: int, channels: int) -> tuple[Tensor, Tensor | int]:
        """Return sample `index` and its label.

        An image is (channels, height, width) uint8 of any size. An input that is not an image has
        the shape and type of `Datasets.plain`. Any exception may be raised.
        """

    def where(self, index: int) -> str:
        """Return the sample's name for messages: its path, if any."""


@runtime_checkable
class PictureSource(Protocol):
    """A source whose images are decoded no larger than needed."""

    def open(self, index: int, channels: int) -> tuple[Picture, Tensor | int]:
        """Return the image of sample `index`, not decoded yet, and its label.

        Opening and decoding may raise any exception.
        """


@runtime_checkable
class LabelledSource(PhotoSource, Protocol):
    """A source whose labels are known without reading an image.

    Ranks that need only labels do not read its images.

    Attributes:
        labels: (samples, ...).
    """

    labels: Array


@dataclass(frozen=True)
class Datasets:
    """A training set and a validation set, and the properties of their samples.

    Attributes:
        name: the recipe's data.name.
        train: the training set.
        val: the validation set.
        classes: names of the classes, or of a regression's values.
        channels: number of channels of an image; for other inputs, the size of the first dimension.
        image_size: size of an image; for other inputs, the size of the last dimension.
        mean: mean of each channel, for pixels in [0, 1]; empty if inputs are not images.
        std: standard deviation of each channel; empty if inputs are not images.
        train_size: size of a training image; None if it is `image_size`.
        resize: size that a photo covers before `image_size` is cropped from its center; None for
            the default (`photo_reader.compute_shorter_side`).
        interpolation: the recipe's data.interpolation.
        holdout: a description of the validation split.
        synthetic: whether the images are random.
        notes: notes for the run's banner, by title.
        targets: shape and type of a sample's targets.
        plain: shape and type of a sample's inputs if they are not images, else None.
        sources: (training set, validation set) before images were resized or decoded into memory;
            if it is empty, use `train` and `val` instead.
        holdout_table: function that returns the text of the run's split.csv; None if this run
            did not divide the images into the two splits.
        damaged: (split, path, reason) of each damaged file; the split is "train" or "val".
    """

    name: str
    train: ImageSet | TensorSet | PhotoSource
    val: ImageSet | TensorSet | PhotoSource
    classes: tuple[str, ...]
    channels: int
    image_size: ImageSize
    mean: tuple[float, ...]
    std: tuple[float, ...]
    holdout: str
    synthetic: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)
    targets: TensorSpec = CLASS
    plain: TensorSpec | None = None
    sources: tuple[Any, ...] = ()
    holdout_table: Callable[[], str] | None = None
    damaged: tuple[tuple[str, str, str], ...] = ()
    train_size: ImageSize | None = None
    resize: ImageSize | None = None
    interpolation: str = "bilinear"

    @property
    def is_in_memory(self) -> bool:
        """Whether the training set is in memory, so that nothing reads it during the run."""
        return isinstance(self.train, ImageSet | TensorSet)

    @property
    def inputs(self) -> TensorSpec:
        """Shape and type of a sample's inputs in evaluation, as the model receives them."""
        return self.plain or TensorSpec((self.channels, *sides(self.image_size)), torch.float32)

    def example(self, rows: int) -> Example:
        """Return shapes and types of a micro-batch of `rows` training samples."""
        if self.train_size is None:
            return Example(rows, self.inputs, self.targets, self.plain is None)
        inputs = TensorSpec((self.channels, *sides(self.train_size)), torch.float32)
        return Example(rows, inputs, self.targets, evaluated=self.inputs)

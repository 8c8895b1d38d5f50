"""What passes between the rooms of `data` and the rest: batches, shares, and sets of images."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy.typing as npt
import torch
from torch import Tensor

from trainer.data.photos.lazy_images import Picture
from trainer.recipe.image_sizes import ImageSize, sides


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device.

    Attributes:
        inputs: (N, ...). Images are (N, C, H, W) float32, normalised; channels_last in memory where the recipe asks for
            it. Empty on a share that needs no inputs.
        targets: (N, ...) as the task wants them: class indices (N,) int64, for example; float32 soft targets under
            mixup and cutmix. Empty on a share that needs no targets.
        count: rows from `count` on are padding (evaluation only).
        samples: of the other rows, their indices in the held-out set (evaluation only; None where these are not known).
    """

    inputs: Tensor
    targets: Tensor
    count: int
    samples: Sequence[int] | None = None


class TensorSpec(NamedTuple):
    """Shape and type of one sample's tensor, without the batch dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> str:
        """As in '["float32", [3, 224, 224]]'."""
        return json.dumps([str(self.dtype).removeprefix("torch."), self.shape])

    @classmethod
    def of(cls, rows: Tensor) -> TensorSpec:
        """Of a row of `rows`."""
        return cls(tuple(rows.shape[1:]), rows.dtype)


CLASS = TensorSpec((), torch.int64)  # one class index


@dataclass(frozen=True)
class Example:
    """Shapes and types of a micro-batch, before the first one is read.

    Attributes:
        rows: samples of a full one.
        inputs, targets: of a sample, as `Batch` has them on the device.
        images: whether the inputs are images, which may be channels_last in memory.
    """

    rows: int
    inputs: TensorSpec
    targets: TensorSpec = CLASS
    images: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a full micro-batch's inputs."""
        return (self.rows, *self.inputs.shape)

    def zeros(self, device: torch.device, rows: int | None = None, channels_last: bool = False) -> Batch:
        """A micro-batch of zeros, of `rows` samples or a full one, with the strides of a batch."""
        count = self.rows if rows is None else rows
        inputs, targets = (
            torch.zeros(count, *part.shape, dtype=part.dtype, device=device) for part in (self.inputs, self.targets)
        )
        return Batch(self._laid_out(inputs, channels_last), targets, count)

    def random(self, device: torch.device, rows: int, channels_last: bool) -> Tensor:
        """Inputs to measure with, the same every time: normal where they are real numbers, else zeros; with the
        strides of a batch."""
        if not self.inputs.dtype.is_floating_point:
            return self.zeros(device, rows).inputs
        inputs = torch.randn(rows, *self.inputs.shape, generator=torch.Generator().manual_seed(0))
        return self._laid_out(inputs.to(device, self.inputs.dtype), channels_last)

    def _laid_out(self, inputs: Tensor, channels_last: bool) -> Tensor:
        if not self.images or inputs.dim() != 4 or not (channels_last or inputs.shape[1] == 1):
            return inputs
        # With one channel both layouts are the same, but strides differ, and a compiler looks at them.
        return inputs.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class DataShare:
    """What a rank reads.

    Attributes:
        index, count: part `index` of `count` of every global batch.
        inputs: whether this rank needs the images; a pipeline stage that is not the first does not.
        targets: whether it needs the labels; a stage that is not the last does not.
        counted: whether its images count: for a teacher a pipeline's last stage reads the first's, none held out.
        numbers: in what proportion all shares divide a batch (`recipe.shares`); empty: equally.
        every_sample: instead of a part of every global batch, a disjoint contiguous part of the epoch's permutation,
            of which every sample is used once an epoch (local SGD, Hogwild).
    """

    index: int = 0
    count: int = 1
    inputs: bool = True
    targets: bool = True
    every_sample: bool = False
    counted: bool = True
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True)
class ImageSet:
    """Images in memory. Sample i is row i % rows, so that a small pool can stand for a large set.

    Attributes:
        images: (rows, C, H, W) uint8.
        labels: (rows, ...) as the task wants them: class indices (rows,) int64, for example.
        length: samples; None is one a row.
        failures: (path, reason) of the files that could not be read and were left out or replaced.
        where: the path of a sample, of images that were files.
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
    """Inputs in memory that are not images, and reach the model as they are: sequences, tokens, volumes.

    Attributes:
        inputs: (rows, ...) of any type.
        labels: (rows, ...) as the task wants them.
    """

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


class PhotoSource(Sized, Protocol):
    """Images read one by one, in loader workers: it must be picklable, and small when pickled."""

    def read(self, index: int, channels: int) -> tuple[Tensor, Tensor | int]:
        """Sample `index` as (channels, height, width) uint8 of any size, and its label; raises whatever goes wrong."""

    def where(self, index: int) -> str:
        """The sample's name for messages: a path where there is one."""


@runtime_checkable
class PictureSource(Protocol):
    """A source whose images are decoded no larger than they are needed."""

    def open(self, index: int, channels: int) -> tuple[Picture, Tensor | int]:
        """Sample `index` and its label; it, and decoding later, raises whatever goes wrong."""


@runtime_checkable
class LabelledSource(PhotoSource, Protocol):
    """A source whose labels are known without reading an image: ranks that need only labels then read no images."""

    labels: npt.NDArray[Any]  # (samples, ...)


@dataclass(frozen=True)
class Datasets:
    """A training and a held-out set, and the properties of their samples."""

    name: str
    train: ImageSet | TensorSet | PhotoSource
    val: ImageSet | TensorSet | PhotoSource
    classes: tuple[str, ...]  # or the names of a regression's values
    channels: int  # where inputs are not images: the first size of a sample, and image_size the last
    image_size: ImageSize
    mean: tuple[float, ...]  # a channel each, of pixels in [0, 1]
    std: tuple[float, ...]
    synthetic: bool
    holdout: str  # what is held out, in words
    notes: Mapping[str, str] = field(default_factory=dict)  # for a run's banner, by title
    targets: TensorSpec = CLASS  # of a sample
    plain: TensorSpec | None = None  # of a sample's inputs where they are not images
    sources: tuple[Any, ...] = ()  # both sets before they were changed to be kept in memory
    holdout_table: Callable[[], str] | None = None  # the text of a run's split.csv, where the split was drawn here
    damaged: tuple[tuple[str, str, str], ...] = ()  # files that are skipped: train or val, path, reason

    @property
    def inputs(self) -> TensorSpec:
        """Of a sample, as the model has it."""
        return self.plain or TensorSpec((self.channels, *sides(self.image_size)), torch.float32)

    def example(self, rows: int) -> Example:
        """What a micro-batch of so many samples looks like."""
        return Example(rows, self.inputs, self.targets, self.plain is None)

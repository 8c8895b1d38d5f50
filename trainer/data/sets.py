"""What passes between the rooms of `data` and the rest: batches, shards, and sets of images."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device.

    Attributes:
        inputs: (N, C, H, W) float32, normalised; channels_last in memory where the recipe asks for it. Empty on a shard
            that needs no images.
        targets: (N,) int64 labels, or (N, K) float32 soft labels under mixup and cutmix. Empty on a shard that needs no
            labels.
        count: rows from `count` on are padding (evaluation only).
    """

    inputs: Tensor
    targets: Tensor
    count: int


@dataclass(frozen=True)
class Shard:
    """What a rank reads.

    Attributes:
        index, count: share `index` of `count` of every global batch.
        inputs: whether this rank needs the images; a pipeline stage that is not the first does not.
        targets: whether it needs the labels; a stage that is not the last does not.
        every_sample: instead of a share of every global batch, a disjoint contiguous part of the epoch's permutation,
            of which every sample is used once an epoch (local SGD, Hogwild).
    """

    index: int = 0
    count: int = 1
    inputs: bool = True
    targets: bool = True
    every_sample: bool = False


@dataclass(frozen=True)
class ImageSet:
    """Images in memory. Sample i is row i % rows, so that a small pool can stand for a large set.

    Attributes:
        images: (rows, C, H, W) uint8, H = W.
        labels: (rows,) int64.
        length: samples; None is one a row.
        failures: (path, reason) of the files that could not be read and were left out or replaced.
    """

    images: Tensor
    labels: Tensor
    length: int | None = None
    failures: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.labels) if self.length is None else self.length


class PhotoSource(Sized, Protocol):
    """Images read one by one, in loader workers: it must be picklable, and small when pickled."""

    def read(self, index: int, channels: int) -> tuple[Tensor, int]:
        """Sample `index` as (channels, height, width) uint8 of any size, and its label; raises whatever goes wrong."""

    def where(self, index: int) -> str:
        """The sample's name for messages: a path where there is one."""


@runtime_checkable
class LabelledSource(PhotoSource, Protocol):
    """A source that knows its labels without reading an image: ranks that need labels only then read none."""

    labels: npt.NDArray[np.int64]  # one a sample


@dataclass(frozen=True)
class Datasets:
    """A training and a held-out set, and what a model and its inputs need to know of them."""

    name: str
    train: ImageSet | PhotoSource
    val: ImageSet | PhotoSource
    classes: tuple[str, ...]
    channels: int
    image_size: int
    mean: tuple[float, ...]  # a channel each, of pixels in [0, 1]
    std: tuple[float, ...]
    synthetic: bool
    split: str  # what is held out, in words
    notes: Mapping[str, str] = field(default_factory=dict)  # what a run's banner should say of them, by title

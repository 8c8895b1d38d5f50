"""Where a loader's batches come from, apart from photos: memory, labels alone, or nothing at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trainer.data.augment import Auto, Draws, Gallery, private_random_state
from trainer.data.photos.copies import on_device, set_on_device
from trainer.data.photos.photo_reader import Unreadable
from trainer.data.sampling import Array
from trainer.data.sets import ImageSet, LabelledSource, PhotoSource, TensorSet
from trainer.recipe import AugmentRecipe

BLOCK = 16_384  # rows whose random draws are made at once


class Feed(Protocol):
    """uint8 images (n, H, W, C), or inputs (n, ...) that are none, and labels (n, ...) on the device, in batches."""

    failures: list[Unreadable]

    def training(self, epoch: int, batches: Sequence[Array]) -> Iterator[tuple[Tensor, Tensor]]: ...

    def evaluation(self, spans: list[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor, int]]: ...

    def close(self) -> None: ...


class MemoryFeed:
    """Batches of a set that lies in memory: taken and augmented in this process, where they are needed."""

    def __init__(
        self,
        images: ImageSet,
        rows: int,
        augment: AugmentRecipe,
        seed: int,
        device: torch.device,
        failures: list[Unreadable],
    ) -> None:
        self.failures = failures
        self._length, self._pool = len(images), len(images.labels)
        self._rows, self._augment, self._seed, self._device = rows, augment, seed, device
        self._gallery = Gallery(images.images, augment.crop_padding if augment.crop == "pad" else 0, device)
        self._labels = set_on_device(images.labels, device)

    def training(self, epoch: int, batches: Sequence[Array]) -> Iterator[tuple[Tensor, Tensor]]:
        for block in _blocks(batches, self._rows):
            index = np.concatenate(block)
            at = on_device(torch.from_numpy(index % self._pool), self._device)
            labels = self._labels[at]
            draws = Draws.of(self._augment, self._seed, epoch, index, self._gallery.width, self._device)
            stop = 0
            for batch in block:
                start, stop = stop, stop + len(batch)
                images = self._gallery.take(at[start:stop], draws.rows(start, stop))
                if self._augment.auto != "none":
                    with private_random_state():
                        images = Auto(self._augment, self._seed, epoch, batch).batch(images)
                yield images, labels[start:stop]

    def evaluation(self, spans: list[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor, int]]:
        for start, stop in spans:
            index = _padded(start, self._rows, self._length) % self._pool
            at = on_device(torch.from_numpy(index), self._device)
            yield self._gallery.take(at, Draws(None, None, None)), self._labels[at], stop - start

    def close(self) -> None:
        """Nothing to end."""


class TensorFeed:
    """Batches of inputs that lie in memory and are no images."""

    def __init__(self, samples: TensorSet, rows: int, device: torch.device) -> None:
        self.failures: list[Unreadable] = []
        self._inputs, self._labels = (set_on_device(part, device) for part in (samples.inputs, samples.labels))
        self._rows, self._device = rows, device

    def training(self, epoch: int, batches: Sequence[Array]) -> Iterator[tuple[Tensor, Tensor]]:
        for block in _blocks(batches, self._rows):
            at = on_device(torch.from_numpy(np.concatenate(block) % len(self._labels)), self._device)
            for index in torch.split(at, [len(batch) for batch in block]):
                yield self._inputs[index], self._labels[index]

    def evaluation(self, spans: list[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor, int]]:
        for start, stop in spans:
            at = on_device(torch.from_numpy(_padded(start, self._rows, len(self._labels))), self._device)
            yield self._inputs[at], self._labels[at], stop - start

    def close(self) -> None:
        """Nothing to end."""


class LabelFeed:
    """Labels without images."""

    def __init__(self, labels: Tensor, length: int, rows: int, device: torch.device) -> None:
        """Sample i of `length` has the label i % len(labels), as in an `ImageSet`."""
        self.failures: list[Unreadable] = []
        self._labels, self._nothing = set_on_device(labels, device), torch.empty(0, device=device)
        self._length, self._rows, self._device = length, rows, device

    def training(self, epoch: int, batches: Sequence[Array]) -> Iterator[tuple[Tensor, Tensor]]:
        for block in _blocks(batches, self._rows):
            for labels in torch.split(self._of(np.concatenate(block)), [len(batch) for batch in block]):
                yield self._nothing, labels

    def evaluation(self, spans: list[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor, int]]:
        for start, stop in spans:
            yield self._nothing, self._of(_padded(start, self._rows, self._length)), stop - start

    def close(self) -> None:
        """Nothing to end."""

    def _of(self, index: Array) -> Tensor:
        return self._labels[on_device(torch.from_numpy(index % len(self._labels)), self._device)]


class NoFeed:
    """Batches that hold neither images nor labels: there are as many, and that is all."""

    def __init__(self, device: torch.device) -> None:
        self.failures: list[Unreadable] = []
        self._nothing = torch.empty(0, device=device)

    def training(self, epoch: int, batches: Sequence[Array]) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in batches:
            yield self._nothing, self._nothing

    def evaluation(self, spans: list[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor, int]]:
        for start, stop in spans:
            yield self._nothing, self._nothing, stop - start

    def close(self) -> None:
        """Nothing to end."""


def labels_at_hand(part: ImageSet | TensorSet | PhotoSource, skip: bool) -> Tensor | None:
    """A set's labels where they are known without reading a photo.

    They are not where unreadable photos are skipped: another sample's label takes the place of theirs.
    """
    if isinstance(part, ImageSet | TensorSet):
        return part.labels
    if isinstance(part, LabelledSource) and not skip:
        return torch.as_tensor(part.labels)
    return None


def _blocks(batches: Sequence[Array], rows: int) -> Iterator[Sequence[Array]]:
    several = max(1, BLOCK // rows)
    return (batches[first : first + several] for first in range(0, len(batches), several))


def _padded(start: int, rows: int, length: int) -> Array:
    """`rows` samples from `start` on, the last one repeated beyond the end."""
    return np.minimum(np.arange(start, start + rows), length - 1)

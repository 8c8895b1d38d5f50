"""Where a loader's batches come from: memory, or readers of photos and of other samples in files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.data.augment import Auto, Draws, Gallery, private_random_state
from trainer.data.folders.photo_folders import unreadable
from trainer.data.photos.copies import Copies, Copy, on_device
from trainer.data.photos.photo_reader import Key, Reader, Report, Unreadable
from trainer.data.sampling import Array
from trainer.data.sets import Datasets, ImageSet, LabelledSource, PhotoSource, TensorSet
from trainer.data.workers.worker_pool import Buffers, Filled, InProcess, Workers
from trainer.recipe import AugmentRecipe, Recipe

BLOCK = 16_384  # rows whose random draws are made at once


class MemoryFeed:
    """Batches of what lies in memory, indexed when they are needed: inputs, labels, or neither, where a rank needs no
    more.

    Both kinds of feed give uint8 images (n, H, W, C), or other inputs (n, ...), and labels (n, ...) on the device.
    """

    def __init__(
        self, inputs: Tensor | None, labels: Tensor | None, length: int, rows: int, device: torch.device
    ) -> None:
        """Sample i of `length` is row i % rows of the tensors, as in an `ImageSet`; of None batches are empty."""
        self.failures: list[Unreadable] = []
        self.uncached = 0
        self._inputs = None if inputs is None else inputs.to(device)
        self._labels = None if labels is None else labels.to(device)
        self._pool = min((len(part) for part in (inputs, labels) if part is not None), default=length)
        self._length, self._rows, self._device = length, rows, device
        self._nothing = torch.empty(0, device=device)

    def training(self, epoch: int, batches: Sequence[Array]) -> Iterator[tuple[Tensor, Tensor]]:
        """A batch for each array of at most `rows` sample indices."""
        several = max(1, BLOCK // self._rows)
        for first in range(0, len(batches), several):
            block = batches[first : first + several]
            index = np.concatenate(block)
            at = on_device(torch.from_numpy(index % self._pool), self._device)
            labels, take = self._taken(self._labels, at), self._drawn(epoch, index)
            stop = 0
            for batch in block:
                start, stop = stop, stop + len(batch)
                yield take(at[start:stop], start, batch), labels[start:stop]

    def evaluation(self, spans: list[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Batches of samples start to stop, padded to `rows`, with the number of rows that count."""
        for start, stop in spans:  # the last sample is repeated beyond the end
            index = np.minimum(np.arange(start, start + self._rows), self._length - 1) % self._pool
            at = on_device(torch.from_numpy(index), self._device)
            yield self._plain(at), self._taken(self._labels, at), stop - start

    def close(self) -> None:
        pass

    def _drawn(self, epoch: int, index: Array) -> Callable[[Tensor, int, Array], Tensor]:
        """What makes training inputs of a part of these samples: of its rows, its place among them, its samples."""
        return lambda at, start, batch: self._plain(at)

    def _plain(self, at: Tensor) -> Tensor:
        return self._taken(self._inputs, at)

    def _taken(self, part: Tensor | None, at: Tensor) -> Tensor:
        return self._nothing if part is None else part[at]


class ImageFeed(MemoryFeed):
    """Batches of images in memory, augmented in this process."""

    def __init__(self, images: ImageSet, rows: int, augment: AugmentRecipe, seed: int, device: torch.device) -> None:
        super().__init__(None, images.labels, len(images), rows, device)
        self._augment, self._seed = augment, seed
        self._gallery = Gallery(images.images, augment.crop_padding if augment.crop == "pad" else 0, device)

    def _drawn(self, epoch: int, index: Array) -> Callable[[Tensor, int, Array], Tensor]:
        size = self._gallery.height, self._gallery.width
        draws = Draws.of(self._augment, self._seed, epoch, index, size, self._device)

        def take(at: Tensor, start: int, batch: Array) -> Tensor:
            images = self._gallery.take(at, draws.rows(start, start + len(batch)))
            if self._augment.auto != "none":
                with private_random_state():
                    images = Auto(self._augment, self._seed, epoch, batch).batch(images)
            return images

        return take

    def _plain(self, at: Tensor) -> Tensor:
        return self._gallery.take(at, Draws(None, None, None))


def readers_of(
    datasets: Datasets, sources: Sequence[PhotoSource], rows: int, recipe: Recipe, workers: int
) -> Workers | InProcess:
    """What reads batches of `rows` samples of all the sources, in so many workers; 0: this process."""

    def readers(buffers: Buffers) -> list[Reader]:
        return [
            Reader(source, buffers.inputs, buffers.labels, recipe, datasets.plain is not None) for source in sources
        ]

    def allocate(count: int) -> Buffers:
        return Buffers.allocate(datasets, rows, count, shared=workers > 0)

    if not workers:
        return InProcess(allocate(1), readers)
    return Workers(sources, allocate, readers, workers, recipe.timeout)


class PhotoFeed:
    """Batches of one of the sources of `readers`.

    Attributes:
        uncached: photos that had to be prepared anew, for the cache lacked them.
    """

    def __init__(self, readers: Workers | InProcess, part: int, rows: int, device: torch.device) -> None:
        self.failures: list[Unreadable] = []
        self.uncached = 0
        self._readers, self._part, self._rows, self._device = readers, part, rows, device
        self._copies = Copies(device)

    def training(self, epoch: int, batches: Sequence[Array]) -> Iterator[tuple[Tensor, Tensor]]:
        return ((images, labels) for images, labels, _ in self._read(self._keys(epoch, batches)))

    def evaluation(self, spans: list[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor, int]]:
        return self._read(self._keys(None, [np.arange(*span) for span in spans]))

    def prefetch(self, epoch: int | None, batches: Sequence[Array]) -> None:
        """Read these as soon as workers have no other work; `epoch` is None for evaluation."""
        self._readers.prefetch(self._keys(epoch, batches))

    def close(self) -> None:
        self._readers.close()

    def _keys(self, epoch: int | None, batches: Sequence[Array]) -> list[Key]:
        return [(self._part, epoch, index) for index in batches]

    def _read(self, keys: list[Key]) -> Iterator[tuple[Tensor, Tensor, int]]:
        filled = self._readers.read(keys)
        return self._overlapped(filled, keys) if self._device.type == "cuda" else self._in_order(filled, keys)

    def _in_order(self, filled: Iterator[Filled], keys: list[Key]) -> Iterator[tuple[Tensor, Tensor, int]]:
        for (inputs, labels, report), key in zip(filled, keys, strict=True):
            rows = self._counted(report, key)
            yield inputs[:rows], labels[:rows].clone(), report.rows  # the slot is filled again after the next batch

    def _overlapped(self, filled: Iterator[Filled], keys: list[Key]) -> Iterator[tuple[Tensor, Tensor, int]]:
        """On a GPU: the next batch is copied, once it has been read, while this one is used."""

        def begin() -> tuple[Copy, Copy, Report] | None:
            batch = next(filled, None)
            return batch and (self._copies.begin(batch.inputs), self._copies.begin(batch.labels), batch.report)

        following: tuple[Copy, Copy, Report] | None = None
        for n, key in enumerate(keys):
            now, following = following or begin(), None
            assert now is not None
            if n + 1 < len(keys) and self._readers.ready():
                following = begin()
            inputs, labels, report = now
            rows = self._counted(report, key)
            batch = inputs.arrived()[:rows], labels.arrived()[:rows], report.rows
            del now, inputs, labels
            yield batch
            del batch

    def _counted(self, report: Report, key: Key) -> int:
        """Note what could not be read; returns the rows of the batch: evaluation pads to full shape."""
        self.failures += report.failures
        self.uncached += report.uncached
        if report.end:
            self.close()
            raise unreadable(report.failures[:1], 1)
        return self._rows if key[1] is None else len(key[2])


def known_labels(part: ImageSet | TensorSet | PhotoSource, skip: bool) -> Tensor | None:
    """A set's labels, where they are known without reading a photo.

    With `skip` (unreadable photos are skipped) they are not: another sample's label replaces that of a skipped one.
    """
    if isinstance(part, ImageSet | TensorSet):
        return part.labels
    if isinstance(part, LabelledSource) and not skip:
        return torch.as_tensor(part.labels)
    return None

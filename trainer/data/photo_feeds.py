"""A loader's batches of photos, or of whatever else is read item by item: from workers, or read here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.data.folders.photo_folders import unreadable
from trainer.data.photos.copies import Copies, Copy
from trainer.data.photos.photo_reader import DenseReader, Key, PlainReader, Reader, Report, Unreadable
from trainer.data.sampling import Array
from trainer.data.sets import Datasets, PhotoSource
from trainer.data.workers.buffers import Buffers, Filled
from trainer.data.workers.worker_counts import Search
from trainer.data.workers.worker_pool import Here, Workers
from trainer.recipe import Recipe


def readers_of(
    datasets: Datasets, sources: Sequence[PhotoSource], rows: int, recipe: Recipe, search: Search
) -> Workers | Here:
    """What reads batches of `rows` samples of all the sources, in as many workers as `search` says; 0: this process."""
    prepare = PlainReader if datasets.plain else DenseReader if len(datasets.targets.shape) > 1 else Reader
    skip = recipe.data.on_error == "skip"

    def make(buffers: Buffers) -> list[Reader]:
        return [
            prepare(source, buffers.inputs, buffers.labels, recipe.augment, recipe.seed, skip) for source in sources
        ]

    def new(count: int) -> Buffers:
        return Buffers.new(datasets, rows, count, shared=search.count > 0)

    return Workers(sources, new, make, search, recipe.timeout) if search.count else Here(new(1), make)


class PhotoFeed:
    """Batches of one of the sources of `readers`."""

    def __init__(self, readers: Workers | Here, part: int, rows: int, device: torch.device) -> None:
        self.failures: list[Unreadable] = []
        self.uncached = 0
        self._readers, self._part, self._rows, self._device = readers, part, rows, device
        self._copies = Copies(device)

    def training(self, epoch: int, batches: Sequence[Array]) -> Iterator[tuple[Tensor, Tensor]]:
        """A batch for each array of at most `rows` sample indices: images (n, H, W, C) uint8 and labels (n, ...)."""
        return ((images, labels) for images, labels, _ in self._read(self._training(epoch, batches)))

    def evaluation(self, spans: list[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Batches of samples start to stop, in full shape, with the number of rows that count."""
        return self._read(self._evaluation(spans))

    def expect_training(self, epoch: int, batches: Sequence[Array]) -> None:
        """After what is being read now, these will be asked for."""
        self._readers.expect(self._training(epoch, batches))

    def expect_evaluation(self, spans: list[tuple[int, int]]) -> None:
        self._readers.expect(self._evaluation(spans))

    def close(self) -> None:
        self._readers.close()

    def _training(self, epoch: int, batches: Sequence[Array]) -> list[Key]:
        return [(self._part, epoch, index) for index in batches]

    def _evaluation(self, spans: list[tuple[int, int]]) -> list[Key]:
        return [(self._part, None, np.arange(*span)) for span in spans]

    def _read(self, keys: list[Key]) -> Iterator[tuple[Tensor, Tensor, int]]:
        filled = self._readers.read(keys)
        return self._in_flight(filled, keys) if self._device.type == "cuda" else self._here(filled, keys)

    def _here(self, filled: Iterator[Filled], keys: list[Key]) -> Iterator[tuple[Tensor, Tensor, int]]:
        for (inputs, labels, report), key in zip(filled, keys, strict=True):
            rows = self._counted(report, key)
            yield inputs[:rows], labels[:rows].clone(), report.rows  # the slot is filled again after the next batch

    def _in_flight(self, filled: Iterator[Filled], keys: list[Key]) -> Iterator[tuple[Tensor, Tensor, int]]:
        """On a GPU: while one batch is used, the next is on its way, as soon as it has been read."""

        def sent() -> tuple[Copy, Copy, Report] | None:
            found = next(filled, None)
            return found and (self._copies.begin(found.inputs), self._copies.begin(found.labels), found.report)

        following: tuple[Copy, Copy, Report] | None = None
        for n, key in enumerate(keys):
            now, following = following or sent(), None
            assert now is not None
            if n + 1 < len(keys) and self._readers.ready():
                following = sent()
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
            raise unreadable(*report.failures[0])
        return self._rows if key[1] is None else len(key[2])

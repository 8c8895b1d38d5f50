"""Feeds: sources of a loader's batches, either in memory or in files that workers read."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.data.augment import Auto, Draws, Gallery
from trainer.data.folders.photo_folders import unreadable
from trainer.data.gpu_decoding import PhotoDecoder
from trainer.data.photos.copies import Copies, Copy, copy_to_device
from trainer.data.photos.photo_reader import (
    BILINEAR,
    Key,
    Reader,
    Report,
    Unreadable,
    select_channels,
)
from trainer.data.sampling import Array, Span
from trainer.data.sets import Datasets, ImageSet, LabelledSource, PhotoSource, TensorSet
from trainer.data.transforms import Transforms
from trainer.data.workers.worker_pool import Buffers, Filled, InProcess, Workers
from trainer.recipe import AugmentRecipe, Recipe

# Number of rows whose random draws are made in one call. One call per small batch would be slow.
BLOCK = 16_384

# Inputs and labels of each batch.
Batches = Iterator[tuple[Tensor, Tensor]]
# Inputs, labels and the number of rows that are not padding.
PaddedBatches = Iterator[tuple[Tensor, Tensor, int]]
# Function (rows, start, batch) that returns the training inputs of a batch. `rows` are the indices
# of the samples' images in memory, `start` is the position of the batch in the block for which
# random draws were made, and `batch` contains the sample indices.
Take = Callable[[Tensor, int, Array], Tensor]
# Copies of inputs and labels in progress, and the report about the batch.
Copying = tuple[Copy, Copy, Report]


class MemoryFeed:
    """Batches of samples that are in memory. A batch is indexed when it is needed.

    All feeds return images (n, H, W, C) uint8, or other inputs (n, ...), and labels (n, ...) on the
    device. Inputs or labels that the rank does not need are empty tensors.
    """

    def __init__(
        self,
        inputs: Tensor | None,
        labels: Tensor | None,
        length: int,
        rows: int,
        device: torch.device,
    ) -> None:
        """Move `inputs` and `labels` to `device`.

        Args:
            inputs: (pool, ...); if None, batches contain no inputs.
            labels: (pool, ...); if None, batches contain no labels.
            length: number of samples; sample i is row i % pool, as in an `ImageSet`.
            rows: number of rows of a full batch.
            device: device of the batches.
        """
        self.failures: list[Unreadable] = []
        self.uncached = 0
        self._inputs = None if inputs is None else inputs.to(device)
        self._labels = None if labels is None else labels.to(device)
        pools = [len(part) for part in (inputs, labels) if part is not None]
        self._pool = min(pools, default=length)
        self._length = length
        self._rows = rows
        self._device = device
        self._nothing = torch.empty(0, device=device)

    def training(self, epoch: int, batches: Sequence[Array]) -> Batches:
        """Yield (inputs, labels) for each array of at most `rows` sample indices."""
        batches_per_block = max(1, BLOCK // self._rows)
        for first in range(0, len(batches), batches_per_block):
            block = batches[first : first + batches_per_block]
            index = np.concatenate(block)
            rows = copy_to_device(torch.from_numpy(index % self._pool), self._device)
            labels = self._select(self._labels, rows)
            take = self._prepare_block(epoch, index)
            stop = 0
            for batch in block:
                start = stop
                stop += len(batch)
                yield take(rows[start:stop], start, batch), labels[start:stop]

    def evaluation(self, spans: list[Span]) -> PaddedBatches:
        """Yield (inputs, labels, count) for each (start, stop) of samples.

        Batches are padded to `rows` rows. The first `count` rows are samples.
        """
        last = self._length - 1
        for start, stop in spans:
            # Padding repeats the last sample.
            index = np.minimum(np.arange(start, start + self._rows), last)
            rows = copy_to_device(torch.from_numpy(index % self._pool), self._device)
            yield self._take_plain(rows), self._select(self._labels, rows), stop - start

    def close(self) -> None:
        """Do nothing: there are no workers to stop."""

    def _prepare_block(self, epoch: int, index: Array) -> Take:
        """Return a `Take` for the batches of a block, which consists of the samples `index`."""
        return lambda rows, start, batch: self._take_plain(rows)

    def _take_plain(self, rows: Tensor) -> Tensor:
        return self._select(self._inputs, rows)

    def _select(self, part: Tensor | None, rows: Tensor) -> Tensor:
        return self._nothing if part is None else part[rows]


class ImageFeed(MemoryFeed):
    """Batches of images in memory, augmented in this process."""

    def __init__(
        self,
        images: ImageSet,
        rows: int,
        augment: AugmentRecipe,
        seed: int,
        device: torch.device,
        interpolation: str = BILINEAR,
    ) -> None:
        super().__init__(None, images.labels, len(images), rows, device)
        self._augment = augment
        self._seed = seed
        padding = augment.crop_padding if augment.crop == "pad" else 0
        # The transforms of torchvision run image by image and draw from torch's CPU generator, so
        # their images stay on the CPU until they are transformed.
        self._home = torch.device("cpu") if augment.transforms else device
        self._gallery = Gallery(images.images, padding, self._home, interpolation)

    def _prepare_block(self, epoch: int, index: Array) -> Take:
        size = (self._gallery.height, self._gallery.width)
        draws = Draws.of(
            self._augment,
            self._seed,
            epoch,
            index,
            size,
            self._home,
        )

        def take(
            rows: Tensor,
            start: int,
            batch: Array,
        ) -> Tensor:
            if self._augment.transforms:
                rows = torch.from_numpy(batch % self._pool)
            images = self._gallery.take(rows, draws.rows(start, start + len(batch)))
            if self._augment.auto != "none":
                with torch.random.fork_rng(devices=[]):
                    images = Auto(self._augment, self._seed, epoch, batch).batch(images)
            if self._augment.transforms:
                transforms = Transforms(self._augment, self._seed, epoch, batch)
                with torch.random.fork_rng(devices=[]):
                    for row, image in enumerate(images.permute(0, 3, 1, 2)):
                        image.copy_(transforms(row, image))
                images = copy_to_device(images, self._device)
            return images

        return take

    def _take_plain(self, rows: Tensor) -> Tensor:
        return self._gallery.take(rows.to(self._home), Draws()).to(self._device)


def build_readers(
    datasets: Datasets,
    sources: Sequence[PhotoSource],
    rows: int,
    recipe: Recipe,
    workers: int,
    keep_jpegs: bool = False,
) -> Workers | InProcess:
    """Create the readers of `sources`, which read batches of `rows` samples.

    The readers run in `workers` processes, or in this process if `workers` is 0. If `keep_jpegs` is
    True, a `PhotoDecoder` must decode some of the photos that they deliver.
    """

    def allocate(slots: int) -> tuple[Buffers, list[Reader]]:
        buffers = Buffers.allocate(datasets, rows, slots, workers > 0, sources)
        plain = datasets.plain is not None
        readers = [
            Reader(source, inputs, buffers.labels, recipe, plain, keep_jpegs)
            for source, inputs in zip(sources, buffers.inputs, strict=True)
        ]
        return buffers, readers

    if workers:
        return Workers(sources, allocate, workers, recipe.timeout)
    return InProcess(*allocate(1))


class PhotoFeed:
    """Batches of photos from one source of `readers`.

    Attributes:
        failures: path of each unreadable sample, and the reason.
        uncached: number of photos that were prepared because the cache lacked them.
    """

    def __init__(
        self,
        readers: Workers | InProcess,
        part: int,
        device: torch.device,
        decoder: PhotoDecoder | None = None,
    ) -> None:
        """Read source number `part` of `readers`, and decode what they have left encoded."""
        self.failures: list[Unreadable] = []
        self.uncached = 0
        self._readers = readers
        self._part = part
        # Without a decoder, a reader leaves nothing encoded.
        self._decode = decoder.fill if decoder else lambda *_: None
        self._copies = Copies(device) if device.type == "cuda" else None

    def training(self, epoch: int, batches: Sequence[Array]) -> Batches:
        """Yield (inputs, labels) for each array of sample indices."""
        filled = self._read(self._keys(epoch, batches))
        return ((inputs[:count], labels[:count]) for inputs, labels, count in filled)

    def evaluation(self, spans: list[Span]) -> PaddedBatches:
        """Yield (inputs, labels, count) for each (start, stop) of samples."""
        batches = [np.arange(*span) for span in spans]
        return self._read(self._keys(None, batches))

    def prefetch(self, epoch: int | None, batches: Sequence[Array]) -> None:
        """Read `batches` as soon as workers are idle. Pass None as `epoch` for evaluation."""
        self._readers.prefetch(self._keys(epoch, batches))

    def close(self) -> None:
        """Stop the workers."""
        self._readers.close()

    def _keys(self, epoch: int | None, batches: Sequence[Array]) -> list[Key]:
        return [(self._part, epoch, index) for index in batches]

    def _read(self, keys: list[Key]) -> PaddedBatches:
        filled = self._readers.read(keys)
        if self._copies:
            return self._read_overlapped(self._copies, filled, keys)
        return self._read_in_order(filled, keys)

    def _read_in_order(self, filled: Iterator[Filled], keys: Sequence[Key]) -> PaddedBatches:
        for (inputs, labels, report), key in zip(filled, keys, strict=True):
            self._add_report(report)
            self._decode(inputs, inputs, report, key)
            # Copy the labels, which may still be in use when the slot is filled for a later batch.
            yield inputs, labels.clone(), report.rows

    def _read_overlapped(
        self,
        copies: Copies,
        filled: Iterator[Filled],
        keys: Sequence[Key],
    ) -> PaddedBatches:
        """Copy the next batch to the GPU while the current one is used.

        The copy starts early only if the next batch has already been read.
        """

        def begin(key: Key) -> Copying:
            slot, labels, report = next(filled)
            inputs = copies.begin(slot, lambda copied: self._decode(copied, slot, report, key))
            return inputs, copies.begin(labels), report

        following: Copying | None = None
        for number, key in enumerate(keys, 1):
            current = following or begin(key)
            following = None
            if number < len(keys) and self._readers.ready():
                following = begin(keys[number])
            inputs, labels, report = current
            self._add_report(report)
            batch = (inputs(), labels(), report.rows)
            # Drop references as early as possible: the GPU needs the memory for the next batch.
            del current, inputs, labels
            yield batch
            del batch

    def _add_report(self, report: Report) -> None:
        """Add the failures of a batch.

        Raises:
            SetupError: an image cannot be read and data.on_error=stop, or none of
                `photo_reader.NEIGHBOURS` consecutive samples can be read in training.
        """
        self.failures += report.failures
        self.uncached += report.uncached
        if report.end:
            self.close()
            raise unreadable(report.failures[:1], 1)


def find_labels(part: ImageSet | TensorSet | PhotoSource, skip: bool) -> Tensor | None:
    """Return the labels of a set if they are known without reading its photos, else None.

    If unreadable photos are skipped (`skip`), the labels of files are unknown, because another
    sample replaces a skipped one.
    """
    if isinstance(part, ImageSet | TensorSet):
        return part.labels
    if isinstance(part, LabelledSource) and not skip:
        return torch.as_tensor(part.labels)
    return None


def read_pictures(
    datasets: Datasets,
    recipe: Recipe,
    samples: Sequence[int],
) -> Tensor:
    """Read validation images as an evaluation crops them, without reader processes.

    Args:
        datasets: the training and the validation set.
        recipe: the recipe.
        samples: n indices in the validation set.

    Returns:
        The images, (n, H, W, 1 or 3) uint8.

    Raises:
        ValueError: an image cannot be read.
    """
    part = datasets.val
    if isinstance(part, ImageSet):
        rows = torch.tensor(samples) % len(part.images)
        return select_channels(part.images[rows].permute(0, 2, 3, 1))
    assert not isinstance(part, TensorSet)
    readers = build_readers(datasets, [part], len(samples), recipe, workers=0)
    [(images, _, report)] = readers.read([(0, None, np.array(samples))])
    if report.failures:
        path, reason = report.failures[0]
        raise ValueError(f"{path}: {reason}")
    return select_channels(images)

"""Batches for a shard: the same samples, augmented alike, for any number of shards and workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trainer.data import order
from trainer.data.augment import Auto, Draws, Finish, Gallery, private_random_state
from trainer.data.order import Array
from trainer.data.photos import Failure
from trainer.data.sets import Batch, Datasets, ImageSet, PhotoSource, Shard
from trainer.data.workers import PhotoFeed, check_shared_memory, slots
from trainer.errors import RecipeError
from trainer.recipe import AugmentRecipe, Recipe
from trainer.world import cores

BLOCK = 16_384  # rows whose random draws are made at once


def full_batches(samples: int, recipe: Recipe, shards: int) -> int:
    """Full global batches in an epoch.

    Raises:
        RecipeError: there is none, with the largest batch size that works.
    """
    if samples >= recipe.batch_size:
        return samples // recipe.batch_size
    rows = shards * recipe.accumulate * recipe.augment.together
    largest = samples // rows * rows
    remedy = f"try batch_size={largest}" if largest else f"at least {rows} are needed"
    raise RecipeError(
        f"{samples} training images are fewer than one global batch (batch_size={recipe.batch_size}); {remedy}"
    )


def worker_count(recipe: Recipe, local_size: int) -> int:
    """Loader workers of one rank, where images are read as they are needed."""
    if recipe.data.workers is not None:
        return recipe.data.workers
    return max(1, min(8, cores() // local_size))


class Loader:
    """Reads a shard's part of every global batch.

    Global batch b of an epoch is permutation[b * batch_size : (b + 1) * batch_size]; shard r of W reads its r-th
    contiguous part, in `accumulate` contiguous micro-batches.
    """

    def __init__(
        self, datasets: Datasets, recipe: Recipe, shard: Shard, device: torch.device, local_size: int = 1
    ) -> None:
        """`local_size` is the number of ranks on this machine, which share its cores and memory.

        Raises:
            RecipeError: fewer training images than one global batch.
            SetupError: too little shared memory for the loader workers.
        """
        self.steps_per_epoch = full_batches(len(datasets.train), recipe, shard.count)
        self._datasets, self._recipe, self._shard = datasets, recipe, shard
        self._rows = recipe.batch_size // (shard.count * recipe.accumulate)
        self._mixes = recipe.augment.together > 1
        classes = recipe.model.num_classes or len(datasets.classes)
        self._finish = Finish(datasets.mean, datasets.std, datasets.image_size, classes, recipe.channels_last, device)
        workers = worker_count(recipe, local_size)
        photos = sum(not isinstance(part, ImageSet) for part in (datasets.train, datasets.val))
        if workers and photos:
            batch_bytes = self._rows * (datasets.image_size**2 * datasets.channels + 8)
            check_shared_memory(photos * local_size * slots(workers) * batch_bytes)

        def feed(part: ImageSet | PhotoSource, augment: AugmentRecipe) -> _Feed:
            if isinstance(part, ImageSet):
                once = list(part.failures) if shard.index == 0 else []  # every rank has decoded every image
                return MemoryFeed(part, self._rows, augment, recipe.seed, device, once)
            return PhotoFeed(part, datasets.image_size, datasets.channels, self._rows, recipe, workers, device)

        self._train = feed(datasets.train, recipe.augment)
        self._val = feed(datasets.val, AugmentRecipe())

    @property
    def skipped(self) -> int:
        """Images that could not be read and were replaced (training) or left out (evaluation), each time."""
        return len(self._train.failures) + len(self._val.failures)

    @property
    def last_skipped(self) -> Failure | None:
        """(path, reason) of one of them."""
        failures = self._train.failures or self._val.failures
        return failures[-1] if failures else None

    def training(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """`accumulate` micro-batches a step, from `start_step` on.

        Raises:
            SetupError: an image cannot be read, and data.on_error=stop.
            PeerError: a loader worker died or hangs.
        """
        recipe, shard = self._recipe, self._shard
        samples = order.permutation(recipe.seed, epoch, len(self._datasets.train))
        steps = order.shard_rows(samples, recipe.batch_size, shard.index, shard.count, recipe.accumulate)
        batches = steps[start_step:].reshape(-1, self._rows)
        for n, (images, labels) in enumerate(self._train.training(epoch, batches)):
            step, piece = divmod(n, recipe.accumulate)
            yield self._batch(images, labels, batches[n], epoch, start_step + step, piece)

    @property
    def evaluation_batches(self) -> int:
        """Batches of one evaluation, the same on every shard."""
        return -(-len(self._datasets.val) // (self._rows * self._shard.count))

    def evaluation(self) -> Iterator[Batch]:
        """The held-out set: over all shards each sample once, in as many full-shape batches on every shard."""
        spans = order.evaluation_spans(len(self._datasets.val), self._rows, self._shard.index, self._shard.count)
        for images, labels, count in self._val.evaluation(spans):
            yield Batch(self._inputs(images), labels, count)

    def close(self) -> None:
        """End the loader workers."""
        self._train.close()
        self._val.close()

    def _inputs(self, images: Tensor) -> Tensor:
        return self._finish.inputs(images) if self._shard.inputs else self._finish.nothing

    def _batch(self, images: Tensor, labels: Tensor, index: Array, epoch: int, step: int, piece: int) -> Batch:
        augment, seed, size = self._recipe.augment, self._recipe.seed, self._datasets.image_size
        inputs = self._inputs(images)
        if augment.erase and self._shard.inputs:
            inputs = self._finish.erased(inputs, order.erase_boxes(seed, epoch, index, augment.erase, size))
        if self._mixes:
            pairs = self._recipe.batch_size // 2
            whole = order.mixing(seed, epoch, step, pairs, augment.mixup, augment.cutmix, size)
            first = (self._shard.index * self._recipe.accumulate + piece) * self._rows
            mix = whole.rows(first, first + self._rows)
            labels = self._finish.soft(labels, mix)
            inputs = self._finish.mixed(inputs, mix) if self._shard.inputs else inputs
        return Batch(inputs, labels, self._rows)


class _Feed(Protocol):
    """uint8 images (rows, H, W, C) and labels (rows,) on the device, a batch at a time."""

    failures: list[Failure]

    def training(self, epoch: int, batches: Array) -> Iterator[tuple[Tensor, Tensor]]: ...

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
        failures: list[Failure],
    ) -> None:
        self.failures = failures
        self._length, self._pool = len(images), len(images.labels)
        self._rows, self._augment, self._seed, self._device = rows, augment, seed, device
        self._gallery = Gallery(images.images, augment.crop_padding if augment.crop == "pad" else 0, device)
        self._labels = images.labels.to(device)

    def training(self, epoch: int, batches: Array) -> Iterator[tuple[Tensor, Tensor]]:
        several = max(1, BLOCK // self._rows)
        for first in range(0, len(batches), several):
            index = batches[first : first + several].reshape(-1)
            at = torch.from_numpy(index % self._pool).to(self._device)
            labels = self._labels[at]
            draws = Draws.of(self._augment, self._seed, epoch, index, self._gallery.width, self._device)
            for row in range(0, len(index), self._rows):
                part = slice(row, row + self._rows)
                images = self._gallery.take(at[part], draws.rows(row, row + self._rows))
                if self._augment.auto != "none":
                    images = self._auto(images, epoch, index[part])
                yield images, labels[part]

    def evaluation(self, spans: list[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor, int]]:
        for start, stop in spans:
            index = np.minimum(np.arange(start, start + self._rows), self._length - 1)
            at = torch.from_numpy(index % self._pool).to(self._device)
            yield self._gallery.take(at, Draws(None, None, None)), self._labels[at], stop - start

    def close(self) -> None:
        """Nothing to end."""

    def _auto(self, images: Tensor, epoch: int, index: Array) -> Tensor:
        auto = Auto(self._augment, self._seed, epoch, index)
        with private_random_state():
            for row, image in enumerate(images):
                images[row] = auto(row, image.permute(2, 0, 1)).permute(1, 2, 0)
        return images

"""Batches for a share: the same samples, augmented alike, for any number of shares and workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trainer.data import sampling
from trainer.data.augment import DeviceTransform
from trainer.data.feeds import ImageFeed, MemoryFeed, PhotoFeed, known_labels, readers_of
from trainer.data.sampling import Array
from trainer.data.sets import Batch, Datasets, DataShare, ImageSet, PhotoSource, TensorSet
from trainer.data.workers.worker_counts import allowed, check_shared_memory, slots
from trainer.data.workers.worker_pool import buffered
from trainer.errors import RecipeError
from trainer.processes import faults
from trainer.recipe import AugmentRecipe, Recipe
from trainer.recipe.shares import given, rows_of
from trainer.tasks import Task


def steps_per_epoch(samples: int, recipe: Recipe, share: DataShare) -> int:
    """Optimizer steps in an epoch of `samples` training images, the same on every share.

    As many as there are full global batches; where every sample is used, as many as the largest share needs with
    batch_size / count images a step. Raises RecipeError.
    """
    if samples < recipe.batch_size:
        rows = share.count * recipe.pieces * recipe.augment.together
        largest = samples // rows * rows
        remedy = f"try batch_size={largest}" if largest else f"at least {rows} are needed"
        raise RecipeError(
            f"{samples} training images are fewer than one global batch (batch_size={recipe.batch_size}); {remedy}"
        )
    if not share.every_sample:
        return samples // recipe.batch_size

    def steps(size: int) -> int:
        if given(recipe):  # which count is unequal need not divide the batch
            return -(-samples // size)
        return sampling.contiguous_steps(samples, size // share.count, share.count)

    def fits(size: int) -> bool:
        """Whether the smallest share has a sample for each micro-batch of each step; a larger size takes fewer."""
        rows = rows_of(recipe.model_copy(update={"batch_size": size}), share.count) if given(recipe) else ()
        spans = [sampling.contiguous_span(samples, index, share.count, rows) for index in range(share.count)]
        return min(stop - start for start, stop in spans) >= steps(size) * recipe.pieces

    if not fits(recipe.batch_size):
        larger = range(recipe.batch_size, samples + 1, share.count * recipe.pieces * recipe.augment.together)
        size = next(filter(fits, larger), None)
        fewer = "use fewer processes" + ", or accumulate=1" * (recipe.pieces > 1)
        raise RecipeError(
            f"{samples} training images over {share.count} processes leave micro-batches empty at "
            f"batch_size={recipe.batch_size} accumulate={recipe.pieces}; "
            + (f"try batch_size={size}" if size else fewer)
        )
    return steps(recipe.batch_size)


def workers_of(recipe: Recipe, readers: int, batch_bytes: int) -> int:
    """Loader workers of one rank, where `readers` ranks of this machine read images: as many as the recipe says, or as
    cores and memory allow. Raises SetupError."""
    count = allowed(readers, batch_bytes) if recipe.data.workers is None else recipe.data.workers
    check_shared_memory(readers * slots(count) * batch_bytes if count else 0)
    return count


class Loader:
    """Reads the batches of a share.

    The epoch's order is `sampling.permutation`, or `sampling.balanced` with data.balance=true.
    Global batch b of an epoch is order[b * batch_size : (b + 1) * batch_size], in `accumulate` contiguous parts, and
    share r of W reads the r-th contiguous part of each (`sampling.share_spans`). A share with every sample reads its
    r-th part of the whole order instead (`sampling.contiguous_rows`), in micro-batches whose sizes differ by one.

    Attributes:
        steps_per_epoch: optimizer steps; only training needs a full one.
        readers: ranks of this machine that read images.
        samples_per_step: training images of all shares together in one step, on average.
    """

    def __init__(
        self, datasets: Datasets, recipe: Recipe, task: Task, share: DataShare, device: torch.device, readers: int = 1
    ) -> None:
        """`readers` is the number of ranks on this machine that read, and share its cores and memory. Raises
        SetupError."""
        self._datasets, self._recipe, self._share, self._device = datasets, recipe, share, device
        samples = len(datasets.train)
        self.samples_per_step = samples / self.steps_per_epoch if share.every_sample else float(recipe.batch_size)
        self._mixes, self._task = recipe.augment.together > 1, task
        self._epoch: tuple[int, list[Array]] | None = None  # the indices of the epoch that was last asked for
        self._transform = DeviceTransform(
            datasets.mean, datasets.std, datasets.image_size, recipe.channels_last, device
        )
        self.readers = readers
        self._feeds: list[MemoryFeed | PhotoFeed] = []  # of training and of evaluation
        self.divide(share.numbers)

    def divide(self, numbers: tuple[float, ...]) -> None:
        """Read from the next batch on what is this share's where shares are in proportion to the numbers."""
        recipe, datasets, device, readers = self._recipe, self._datasets, self._device, self.readers
        share = self._share = replace(self._share, numbers=numbers)
        rows = rows_of(recipe, share.count, numbers=numbers)
        self._spans = sampling.share_spans(recipe.batch_size, rows, share.index)
        self._every = rows if numbers else [max(rows)] * share.count  # of a batch of evaluation
        self._rows, self._epoch = self._every[share.index], None
        self.close()
        counted = [(feed.failures, feed.uncached) for feed in self._feeds]
        self._feeds.clear()  # a device that holds the images has no room for two of them
        # Photos are read for themselves, or for labels that are known in no other way.
        parts, skip = (datasets.train, datasets.val), recipe.data.on_error == "skip"
        labels = [known_labels(part, skip) if share.targets else None for part in parts]
        reads = share.inputs, share.inputs and share.counted
        sources: list[PhotoSource] = [
            part
            for part, known, read in zip(parts, labels, reads, strict=True)
            if not isinstance(part, ImageSet | TensorSet) and (read or (share.targets and known is None))
        ]
        self._slot, self._workers = 0, 0
        if sources:
            self._slot = self._rows * (buffered(datasets).bytes + datasets.targets.bytes + 8)
            self._workers = workers_of(recipe, readers, self._slot)
        pool = readers_of(datasets, sources, self._rows, recipe, self._workers) if sources else None

        def feed(
            part: ImageSet | TensorSet | PhotoSource, known: Tensor | None, augment: AugmentRecipe, read: bool
        ) -> MemoryFeed | PhotoFeed:
            number = next((n for n, each in enumerate(sources) if each is part), None)
            if pool is not None and number is not None:
                return PhotoFeed(pool, number, self._rows, device)
            if read and isinstance(part, ImageSet):
                images = ImageFeed(part, self._rows, augment, recipe.seed, device)
                if share.index == 0 and not counted:  # every rank has decoded every image
                    images.failures += part.failures
                return images
            inputs = part.inputs if read and isinstance(part, TensorSet) else None
            return MemoryFeed(inputs, known, len(part), self._rows, device)

        self._feeds += [
            feed(*each) for each in zip(parts, labels, (recipe.augment, AugmentRecipe()), reads, strict=True)
        ]
        for made, (failures, uncached) in zip(self._feeds, counted, strict=False):
            made.failures, made.uncached = failures, uncached

    @cached_property
    def steps_per_epoch(self) -> int:
        """Raises RecipeError: too few training images (see the function)."""
        return steps_per_epoch(len(self._datasets.train), self._recipe, self._share)

    @property
    def skipped(self) -> int:
        """Images that could not be read and were replaced (training) or left out (evaluation), each time.

        A share without inputs has none: the rank that needs the same images counts them.
        """
        return sum(len(feed.failures) for feed in self._feeds) if self._share.inputs and self._share.counted else 0

    @property
    def uncached(self) -> int:
        """Photos that the cache lacked, each time: they were prepared anew. Counted as `skipped` ones are."""
        return sum(feed.uncached for feed in self._feeds) if self._share.inputs and self._share.counted else 0

    @property
    def workers(self) -> int | None:
        """Processes that read training images for this rank; None where they lie in memory."""
        return None if isinstance(self._datasets.train, ImageSet | TensorSet) else self._workers

    def workers_in_words(self) -> str | None:
        """How many processes read, and the memory that they take; None where none do."""
        count = self._workers
        if not count:
            return None
        size = slots(count) * self._slot / 2**20
        return f"{count} process{'es' * (count > 1)} a rank, {slots(count)} batches in {size:,.0f} MiB of shared memory"

    def training(self, epoch: int, start_step: int = 0, stop_step: int | None = None) -> Iterator[Batch]:
        """`accumulate` micro-batches a step, from `start_step` on to the epoch's end or `stop_step`.

        The evaluation's first batches are read while the last ones are used.

        Raises:
            SetupError: an image cannot be read, and data.on_error=stop.
            PeerError: a loader worker died or hangs.
        """
        pieces = self._recipe.pieces
        indices = self._indices(epoch)
        steps, wanted = len(indices) // pieces, slice(start_step * pieces, stop_step and stop_step * pieces)
        train, val = self._feeds
        batches = train.training(epoch, indices[wanted])
        if isinstance(val, PhotoFeed):
            val.prefetch(None, [np.arange(*span) for span in self.evaluation_spans])
        for n, ((images, labels), index) in enumerate(zip(batches, indices[wanted], strict=True)):
            step, piece = divmod(n, pieces)
            batch = self._batch(images, labels, index, epoch, start_step + step, piece)
            if faults.active:
                faults.inject(batch.inputs, epoch * steps + start_step + step + 1)
            yield batch

    def _indices(self, epoch: int) -> list[Array]:
        """The samples of each micro-batch of an epoch."""
        if self._epoch is None or self._epoch[0] != epoch:
            recipe, share = self._recipe, self._share
            order, size = self._order(epoch), recipe.batch_size
            if share.every_sample:
                rows = rows_of(recipe, share.count, numbers=share.numbers) if share.numbers else ()
                start, stop = sampling.contiguous_span(len(order), share.index, share.count, rows)
                steps = sampling.contiguous_rows(order[start:stop], self.steps_per_epoch, recipe.pieces)
            else:
                steps = sampling.share_rows(order, size, self._spans)
            self._epoch = epoch, [piece for step in steps for piece in step]
        return self._epoch[1]

    def _order(self, epoch: int) -> Array:
        """The samples of an epoch, in order."""
        recipe, part = self._recipe, self._datasets.train
        labels = known_labels(part, skip=False) if recipe.data.balance else None
        if labels is None:
            return sampling.permutation(recipe.seed, epoch, len(part))
        rows = len(labels)  # of a small pool, sample i has the label of row i % rows
        stride = -(-len(part) // rows) * rows
        return sampling.balanced(recipe.seed, epoch, labels.numpy()[np.arange(len(part)) % rows], stride)

    @property
    def evaluation_spans(self) -> list[tuple[int, int]]:
        """Which held-out samples this share's batches of one evaluation hold, (start, stop): as many on every share."""
        return sampling.evaluation_spans(len(self._datasets.val), self._every, self._share.index)

    def evaluation(self, then: int | None = None) -> Iterator[Batch]:
        """The held-out set: over all shares each sample once, in as many full-shape batches on every share.

        With data.on_error=skip, `count` leaves out unreadable images, but not on a share that reads nothing. The first
        batches of the epoch `then` are prefetched.
        """
        train, val = self._feeds
        batches = val.evaluation(self.evaluation_spans)
        if then is not None and isinstance(train, PhotoFeed):
            train.prefetch(then, self._indices(then))
        for (images, labels, count), span in zip(batches, self.evaluation_spans, strict=True):
            inputs = self._inputs(images) if self._share.counted else self._transform.nothing
            yield Batch(inputs, self._targets(labels), count, self._samples(range(*span), count))

    def _samples(self, span: range, count: int) -> Sequence[int] | None:
        """The held-out samples of the batch that was just read, `count` of a span: the others could not be read."""
        if count == len(span):
            return span
        where = getattr(self._datasets.val, "where", None)
        left_out = {path for path, _ in self._feeds[1].failures[count - len(span) :]}
        samples = [sample for sample in span if where is not None and where(sample) not in left_out]
        return samples if len(samples) == count else None

    def close(self) -> None:
        """End the loader workers."""
        for feed in self._feeds:
            feed.close()

    def _inputs(self, images: Tensor) -> Tensor:
        if not self._share.inputs:
            return self._transform.nothing
        return images if self._datasets.plain else self._transform.inputs(images)

    def _targets(self, labels: Tensor) -> Tensor:
        return labels if self._share.targets else self._transform.nothing

    def _batch(self, images: Tensor, labels: Tensor, index: Array, epoch: int, step: int, piece: int) -> Batch:
        augment, seed, size, share = self._recipe.augment, self._recipe.seed, self._datasets.image_size, self._share
        inputs, targets = self._inputs(images), self._targets(labels)
        if augment.erase and share.inputs:
            inputs = self._transform.erased(inputs, sampling.erase_boxes(seed, epoch, index, augment.erase, size))
        if self._mixes:
            pairs, (first, _) = self._recipe.batch_size // 2, self._spans[piece]
            whole = sampling.mixing(seed, epoch, step, pairs, augment.mixup, augment.cutmix, size)
            mix = whole.rows(first, first + len(index))  # a micro-batch may be shorter than others
            targets = self._transform.soft(self._task.shares(targets), mix) if share.targets else targets
            inputs = self._transform.mixed(inputs, mix) if share.inputs else inputs
        return Batch(inputs, targets, len(index))

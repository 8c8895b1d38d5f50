"""Data loading: the batches of one share of the global batch.

The samples of a global batch, and their augmentation, are the same for any number of shares and
loader workers. With `DataShare.every_sample`, there are no common global batches: each share reads
its own part of the epoch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data import sampling
from trainer.data.augment import DeviceTransform
from trainer.data.feeds import ImageFeed, MemoryFeed, PhotoFeed, build_readers, find_labels
from trainer.data.gpu_decoding import PhotoDecoder
from trainer.data.sampling import Array, Span
from trainer.data.sets import Batch, Datasets, DataShare, ImageSet, TensorSet
from trainer.data.workers.worker_counts import allowed, slots
from trainer.data.workers.worker_pool import buffered
from trainer.errors import RecipeError
from trainer.memory.device import check_shared_memory
from trainer.processes import faults
from trainer.recipe import AugmentRecipe, Recipe
from trainer.recipe.image_sizes import ImageSize
from trainer.recipe.shares import count_rows, fixed_shares
from trainer.tasks import Task


def count_steps_per_epoch(
    samples: int,
    recipe: Recipe,
    share: DataShare,
) -> int:
    """Return the number of optimizer steps in an epoch of `samples` training images.

    The number is the same on all shares. Normally, it is the number of full global batches. If
    every sample is used (`share.every_sample`), it is the number of steps that the largest share
    needs for its samples. With equal shares, a step has at most batch_size / `share.count` samples
    of each share.

    Raises:
        RecipeError: there are fewer images than a global batch, or a micro-batch would be empty.
    """
    micro_batches = recipe.pieces
    # A valid batch size is a multiple of this number of images.
    unit = share.count * micro_batches * recipe.augment.together
    if samples < recipe.batch_size:
        largest = samples // unit * unit
        remedy = f"try batch_size={largest}" if largest else f"at least {unit} are needed"
        raise RecipeError(
            f"{samples} training images are fewer than one global batch "
            f"(batch_size={recipe.batch_size}); {remedy}"
        )
    if not share.every_sample:
        return samples // recipe.batch_size

    def count_steps(batch_size: int) -> int:
        # The samples of unequal shares are proportional to their rows of a batch, so every share
        # needs as many steps as all shares together. `share.count` need not divide `batch_size`.
        if fixed_shares(recipe):
            return -(-samples // batch_size)
        # If the shares are equal, the last one also gets the remainder.
        start, stop = sampling.compute_span(samples, share.count - 1, share.count)
        return -(-(stop - start) // (batch_size // share.count))

    def fills_micro_batches(batch_size: int) -> bool:
        """Return whether the smallest share has a sample for each micro-batch of each step.

        A larger batch size leads to fewer steps, and therefore to more samples in each step.
        """
        rows: Sequence[int] = ()
        if fixed_shares(recipe):
            resized = recipe.model_copy(update={"batch_size": batch_size})
            rows = count_rows(resized, share.count)
        sizes = []
        for index in range(share.count):
            start, stop = sampling.compute_span(samples, index, share.count, rows)
            sizes.append(stop - start)
        return min(sizes) >= count_steps(batch_size) * micro_batches

    if not fills_micro_batches(recipe.batch_size):
        larger = range(recipe.batch_size, samples + 1, unit)
        size = next(filter(fills_micro_batches, larger), None)
        if size:
            remedy = f"try batch_size={size}"
        elif micro_batches > 1:
            remedy = "use fewer processes, or accumulate=1"
        else:
            remedy = "use fewer processes"
        raise RecipeError(
            f"{samples} training images over {share.count} processes leave micro-batches empty at "
            f"batch_size={recipe.batch_size} accumulate={micro_batches}; {remedy}"
        )
    return count_steps(recipe.batch_size)


def count_workers(
    recipe: Recipe,
    readers: int,
    batch_bytes: int,
) -> int:
    """Return the number of loader workers of one rank.

    The number is data.workers. By default, the cores and the memory of this machine determine it.

    Args:
        recipe: the recipe.
        readers: number of ranks on this machine that read images.
        batch_bytes: size in bytes of one batch in shared memory.

    Raises:
        SetupError: the shared memory is too small.
    """
    count = recipe.data.workers
    if count is None:
        count = allowed(readers, batch_bytes)
    if count:
        check_shared_memory(readers * slots(count) * batch_bytes)
    return count


class Loader:
    """Reads the batches of a share.

    The order of samples in an epoch comes from `sampling.draw_permutation`, or with
    data.balance=true from `sampling.draw_balanced_permutation`, or with augment.repeats from
    `sampling.repeat_order`. Global batch b of an epoch is
    order[b * batch_size : (b + 1) * batch_size]. It consists of `accumulate` contiguous
    micro-batches. Share r of W reads the r-th contiguous part of each micro-batch
    (`sampling.share_spans`). With `DataShare.every_sample`, share r instead reads the r-th part of
    the whole order (`sampling.divide_rows`), in micro-batches whose sizes differ by at most one.

    Attributes:
        datasets: the training and the validation set.
        readers: number of ranks on this machine that read images.
        samples_per_step: mean number of training images of all shares together in one step.
        evaluates_ends: whether an evaluation reads only the first and the last batch of the
            validation set.
    """

    evaluates_ends = False

    def __init__(
        self,
        datasets: Datasets,
        recipe: Recipe,
        task: Task,
        share: DataShare,
        device: torch.device,
        readers: int = 1,
    ) -> None:
        """Create the feeds of `share`.

        Args:
            datasets: the training and the validation set.
            recipe: the recipe.
            task: the task, which says how targets are mixed.
            share: the part of the data that this rank reads.
            device: device of the batches.
            readers: number of ranks on this machine that read images. They divide the machine's
                cores and memory.

        Raises:
            SetupError: the shared memory is too small for the loader workers.
        """
        self.datasets = datasets
        self._recipe = recipe
        self._share = share
        self._device = device
        self.samples_per_step = float(recipe.batch_size)
        if share.every_sample:
            self.samples_per_step = len(datasets.train) / self.steps_per_epoch
        self._mixes = recipe.augment.together > 1
        self._task = task
        # Number of the epoch that was used last, and the sample indices of its micro-batches.
        self._epoch: tuple[int, list[Array]] | None = None
        self._train_size = datasets.train_size or datasets.image_size
        self._transform = self._build_transform(self._train_size)
        self._evaluation_transform = self._transform
        if datasets.train_size:
            self._evaluation_transform = self._build_transform(datasets.image_size)
        self.readers = readers
        # The feed for training and the feed for evaluation.
        self._feeds: list[MemoryFeed | PhotoFeed] = []
        self.set_shares(share.numbers)

    def _build_transform(self, size: ImageSize) -> DeviceTransform:
        datasets = self.datasets
        channels_last = self._recipe.channels_last
        return DeviceTransform(datasets.mean, datasets.std, size, channels_last, self._device)

    def set_shares(self, numbers: tuple[float, ...]) -> None:
        """Divide each batch among the shares in proportion to `numbers`; equally if it is empty.

        The present feeds are closed, and new ones are created for the next epoch or evaluation.
        """
        recipe = self._recipe
        datasets = self.datasets
        device = self._device
        share = replace(self._share, numbers=numbers)
        self._share = share
        rows = share.count_rows(recipe)
        self._spans = sampling.share_spans(recipe.batch_size, rows, share.index)
        self._evaluation_rows = rows if numbers else [max(rows)] * share.count
        self._rows = self._evaluation_rows[share.index]
        self._epoch = None
        self.close()
        counters = [(feed.failures, feed.uncached) for feed in self._feeds]
        # Free the old feeds first: a device that keeps all images may have no memory for a second
        # copy.
        self._feeds.clear()
        skip = recipe.data.on_error == "skip"
        splits = []
        sources = []
        for part, augment, needed in (
            (datasets.train, recipe.augment, share.inputs),
            (datasets.val, AugmentRecipe(), share.inputs and share.counted),
        ):
            labels = find_labels(part, skip) if share.targets else None
            splits.append((part, labels, augment, needed))
            if isinstance(part, ImageSet | TensorSet):
                continue
            # A rank that needs only targets must read the photos if their labels are not known.
            if needed or (share.targets and labels is None):
                sources.append(part)
        self._slot_bytes = 0
        self._workers = 0
        pool = None
        if sources:
            input_bytes = max(buffered(datasets, training).bytes for training in (True, False))
            row_bytes = input_bytes + datasets.targets.bytes + 8
            self._slot_bytes = self._rows * row_bytes
            self._workers = count_workers(recipe, self.readers, self._slot_bytes)
            pool = build_readers(
                datasets,
                sources,
                self._rows,
                recipe,
                self._workers,
                recipe.data.decode == "gpu",
            )
        for part, labels, augment, needed in splits:
            feed: MemoryFeed | PhotoFeed
            if pool is not None and part in sources:
                number = sources.index(part)
                decoder = None
                if recipe.data.decode == "gpu":
                    shape = buffered(datasets, part is datasets.train).shape
                    decoder = PhotoDecoder(device, sources[number], recipe, shape)
                feed = PhotoFeed(pool, number, device, decoder)
            elif needed and isinstance(part, ImageSet):
                feed = ImageFeed(
                    part,
                    self._rows,
                    augment,
                    recipe.seed,
                    device,
                    datasets.interpolation,
                )
                # All ranks have decoded all images, so only the first share reports the failures.
                if share.index == 0 and not counters:
                    feed.failures += part.failures
            else:
                inputs = part.inputs if needed and isinstance(part, TensorSet) else None
                feed = MemoryFeed(
                    inputs,
                    labels,
                    len(part),
                    self._rows,
                    device,
                )
            self._feeds.append(feed)
        for feed, (failures, uncached) in zip(self._feeds, counters, strict=False):
            feed.failures = failures
            feed.uncached = uncached

    @cached_property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps per epoch.

        Raises:
            RecipeError: there are too few training images.
        """
        return count_steps_per_epoch(len(self.datasets.train), self._recipe, self._share)

    @property
    def skipped(self) -> int:
        """Number of times that an unreadable image was replaced (training) or skipped (evaluation).

        The number is 0 on a rank that needs no images, or needs them only for a teacher. The rank
        on which the model reads the same images counts them.
        """
        if self._share.inputs and self._share.counted:
            return sum(len(feed.failures) for feed in self._feeds)
        return 0

    @property
    def uncached(self) -> int:
        """Number of times that a photo was prepared because the cache lacked it.

        As in `skipped`, only the rank on which the model reads the images counts them.
        """
        if self._share.inputs and self._share.counted:
            return sum(feed.uncached for feed in self._feeds)
        return 0

    @property
    def workers(self) -> int | None:
        """Number of processes that read training images for this rank; None for a set in memory."""
        return None if self.datasets.is_in_memory else self._workers

    def workers_in_words(self) -> str | None:
        """Describe the loader workers and their memory; return None if there are none."""
        count = self._workers
        if not count:
            return None
        batches = slots(count)
        megabytes = batches * self._slot_bytes / 2**20
        processes = "process" if count == 1 else "processes"
        return (
            f"{count} {processes} a rank, {batches} batches in {megabytes:,.0f} MiB of shared "
            "memory"
        )

    def training(
        self,
        epoch: int,
        start_step: int = 0,
        stop_step: int | None = None,
    ) -> Iterator[Batch]:
        """Yield `accumulate` micro-batches per step, from `start_step` to `stop_step`.

        By default, `stop_step` is the end of the epoch. Workers read the first batches of the
        evaluation while the last batches before `stop_step` are used.

        Raises:
            SetupError: an image cannot be read and data.on_error=stop, or none of
                `photo_reader.NEIGHBOURS` consecutive samples can be read.
            PeerError: a loader worker died or hangs.
        """
        recipe = self._recipe
        augment = recipe.augment
        share = self._share
        size = self._train_size
        micro_batches = recipe.pieces
        indices = self.indices(epoch)
        steps = len(indices) // micro_batches
        if stop_step is None:
            stop_step = steps
        indices = indices[start_step * micro_batches : stop_step * micro_batches]
        train, val = self._feeds
        batches = train.training(epoch, indices)
        if isinstance(val, PhotoFeed):
            val.prefetch(None, [np.arange(*span) for span in self.evaluation_spans])
        for n, ((images, labels), index) in enumerate(zip(batches, indices, strict=True)):
            step, piece = divmod(n, micro_batches)
            step += start_step
            inputs = self._inputs(images, self._transform)
            targets = self._targets(labels)
            if augment.erase and share.inputs:
                boxes = sampling.draw_erase_boxes(
                    recipe.seed,
                    epoch,
                    index,
                    augment.erase,
                    size,
                )
                inputs = self._transform.erase(inputs, boxes)
            if self._mixes:
                whole = sampling.draw_mix(
                    recipe.seed,
                    epoch,
                    step,
                    recipe.batch_size // 2,
                    augment.mixup,
                    augment.cutmix,
                    size,
                )
                first, _ = self._spans[piece]
                # Use the length of the micro-batch, which may be shorter than its span.
                mix = whole.rows(first, first + len(index))
                if share.targets:
                    targets = self._transform.mix_pairs(self._task.shares(targets), mix.label)
                if share.inputs:
                    inputs = self._transform.mix(inputs, mix)
            if faults.is_active:
                faults.inject(inputs, epoch * steps + step + 1)
            yield Batch(inputs, targets, len(index))

    def indices(self, epoch: int) -> list[Array]:
        """Return the sample indices of each micro-batch of an epoch."""
        if self._epoch is None or self._epoch[0] != epoch:
            recipe = self._recipe
            share = self._share
            order = self._order(epoch)
            if share.every_sample:
                start, stop = share.compute_span(recipe, len(order))
                steps = sampling.divide_rows(order[start:stop], self.steps_per_epoch, recipe.pieces)
            else:
                steps = sampling.share_rows(order, recipe.batch_size, self._spans)
            self._epoch = epoch, [*chain.from_iterable(steps)]
        return self._epoch[1]

    def _order(self, epoch: int) -> Array:
        """Return the order in which all shares together read the samples of an epoch."""
        recipe = self._recipe
        train = self.datasets.train
        samples = len(train)
        # Sample i of an `ImageSet` is row i % rows, so that few images can stand for many samples.
        rows = len(train.labels) if isinstance(train, ImageSet) else samples
        stride = -(-samples // rows) * rows
        labels = find_labels(train, skip=False) if recipe.data.balance else None
        if labels is not None:
            sample_labels = labels.numpy()[np.arange(samples) % rows]
            return sampling.draw_balanced_permutation(recipe.seed, epoch, sample_labels, stride)
        order = sampling.draw_permutation(recipe.seed, epoch, samples)
        if recipe.augment.repeats == 1:
            return order
        return sampling.repeat_order(order, recipe.batch_size, recipe.augment.repeats, stride)

    @property
    def evaluation_spans(self) -> list[Span]:
        """Range (start, stop) of the validation samples in each batch of this share.

        All shares have the same number of batches. With `evaluates_ends`, there are at most two.
        """
        spans = sampling.list_evaluation_spans(
            len(self.datasets.val), self._evaluation_rows, self._share.index
        )
        if self.evaluates_ends:
            return spans[:: max(1, len(spans) - 1)]
        return spans

    def evaluation(self, then: int | None = None) -> Iterator[Batch]:
        """Yield the batches of the validation set, padded to their full shape.

        All shares together evaluate each sample once, in the same number of batches, or with
        `evaluates_ends` only the samples of the first and the last batch. With data.on_error=skip,
        `Batch.count` does not include unreadable images. A rank that reads no files cannot know
        which images are unreadable, so its `Batch.count` includes them.

        Args:
            then: epoch of the training that follows. Workers read its first batches while the last
                batches of the evaluation are used. None to read nothing in advance.
        """
        train, val = self._feeds
        spans = self.evaluation_spans
        batches = val.evaluation(spans)
        if then is not None and isinstance(train, PhotoFeed):
            train.prefetch(then, self.indices(then))
        for (images, labels, count), span in zip(batches, spans, strict=True):
            inputs = self._transform.nothing
            if self._share.counted:
                inputs = self._inputs(images, self._evaluation_transform)
            samples = self._samples(range(*span), count)
            yield Batch(inputs, self._targets(labels), count, samples)

    def _samples(self, span: range, count: int) -> Sequence[int] | None:
        """Return the indices of the validation samples in the batch that was just read.

        Args:
            span: indices of the samples that the batch should contain.
            count: number of these samples that could be read.

        Returns:
            The indices of the samples that could be read. None if they cannot be identified,
            because several samples have the same path.
        """
        if count == len(span):
            return span
        # Only photos can be skipped, and each of them has a path.
        photos: Any = self.datasets.val
        failures = self._feeds[1].failures[count - len(span) :]
        skipped_paths = {path for path, _ in failures}
        samples = [sample for sample in span if photos.where(sample) not in skipped_paths]
        return samples if len(samples) == count else None

    def close(self) -> None:
        """Stop the loader workers."""
        for feed in self._feeds:
            feed.close()

    def _inputs(self, images: Tensor, transform: DeviceTransform) -> Tensor:
        if not self._share.inputs:
            return transform.nothing
        if self.datasets.plain:
            return images
        return transform.inputs(images)

    def _targets(self, labels: Tensor) -> Tensor:
        if self._share.targets:
            return labels
        return self._transform.nothing

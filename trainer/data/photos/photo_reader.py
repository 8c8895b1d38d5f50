"""Photos: from a sample index to a uint8 image of the right size, in a loader worker; samples as pictures."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import functional as vision

from trainer.data import sampling
from trainer.data.augment import Auto, private_random_state
from trainer.data.generators import Generators
from trainer.data.photos.decoding import reason
from trainer.data.photos.lazy_images import Picture
from trainer.data.sampling import Array
from trainer.data.sets import Datasets, ImageSet, LabelledSource, PhotoSource, PictureSource
from trainer.recipe import AugmentRecipe, Recipe
from trainer.recipe.image_sizes import ImageSize, sides

TINY = 64  # images of this size and less are not cropped for evaluation
VECTORISED = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")  # torch resizes uint8 directly
NEIGHBOURS = 100  # further samples that are tried in place of one that cannot be read

# Which of the readers; epoch, or None for evaluation; sample indices, in training modulo the samples
# (`sampling.balanced`).
Key = tuple[int, int | None, Array]
Unreadable = tuple[str, str]  # what could not be read, and why


class Report(NamedTuple):
    """The result of filling a slot."""

    rows: int  # that are not padding
    failures: list[Unreadable]  # what could not be read
    end: bool = False  # whether the first of them ends training
    uncached: int = 0  # photos that the cache lacked


def held_out(picture: Picture, size: ImageSize, shorter: ImageSize | None = None) -> Tensor:
    """A photo for evaluation: resized until it covers `shorter`, and `size` cut out of the centre.

    Evaluation and prediction both use it, and so have the same pixels. The image is decoded no larger than needed.
    `shorter` is by default `shorter_side(size)`.
    """
    shorter = shorter or shorter_side(size)
    return centre_cut(picture.whole(shorter), size, shorter)


def centre_cut(images: Tensor, size: ImageSize, shorter: ImageSize) -> Tensor:
    """Images (..., C, H, W) resized until they cover `shorter`, and `size` cut out of the centre."""
    height, width = images.shape[-2:]
    if (wanted := covering(height, width, shorter)) != (height, width):
        images = resized(images, [*wanted])
    centre: Tensor = vision.center_crop(images, [*sides(size)])
    return centre


def covering(height: int, width: int, box: ImageSize) -> tuple[int, int]:
    """The height and width that an image is resized to, in proportion, until it just covers a box. Of a square box it
    has the shorter side, as of torchvision's Resize(side)."""
    high, wide = sides(box)
    if high * width >= wide * height:
        return high, int(high * width / height)
    return int(wide * height / width), wide


def shorter_side(size: ImageSize) -> ImageSize:
    """What a photo covers before `size` is cut out for evaluation, of a square its shorter side: size / 0.875; tiny
    ones are not cut."""
    if max(sides(size)) <= TINY:
        return size
    return round(size / 0.875) if isinstance(size, int) else (round(size[0] / 0.875), round(size[1] / 0.875))


def shorter_side_of(data: Datasets) -> ImageSize:
    """The same for a data set's held-out images: of those in memory, or with a target for each pixel, the shorter side
    becomes the image's."""
    whole = isinstance(data.val, ImageSet) or len(data.targets.shape) > 1
    return data.image_size if whole else shorter_side(data.image_size)


def resized(image: Tensor, size: list[int]) -> Tensor:
    """Resize an image (C, H, W), or several, to [height, width], or their shorter side to [length]."""
    if image.dim() > 3:
        several: Tensor = vision.resize(image, size, antialias=True)
        return several
    # channels_last is how JPEG is decoded and batches are kept: faster to resize and to copy.
    whole = image[None].contiguous(memory_format=torch.channels_last)
    if len(size) == 1 or not VECTORISED or image.dtype != torch.uint8 or image.shape[1:] == (*size,):
        small: Tensor = vision.resize(whole, size, antialias=True)
        return small[0]
    # What torchvision calls, without its checks of each argument: a quarter of the time of a small image. The stride of
    # the first dimension is set, or torch returns another layout (pytorch/pytorch#68430).
    whole = whole.as_strided(whole.shape, (whole.numel(), *whole.stride()[1:]))
    return F.interpolate(whole, size, mode="bilinear", antialias=True)[0]


def seed_draws(seed: int, epoch: int, sample: int) -> int:
    """Seed torch, NumPy and random, for what a user's data set draws for this sample in this epoch; returns a seed for
    its own generators."""
    key = int(sampling.hashed(seed, epoch, sample, sampling.ITEM)[0])
    torch.default_generator.manual_seed(key >> 1)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    return key


@contextmanager
def private_draws() -> Iterator[None]:
    """Restore the states of random, NumPy and torch afterwards."""
    before, state = random.getstate(), np.random.get_state()
    try:
        with private_random_state():
            yield
    finally:
        random.setstate(before)
        np.random.set_state(state)


class PhotoDraws:
    """The random augmentation of some photos, in a worker."""

    def __init__(self, recipe: AugmentRecipe, seed: int, epoch: int, index: Array) -> None:
        self.recipe = recipe
        self.crop: sampling.CropBoxes | None = None
        if recipe.crop == "resized":
            low, high = recipe.crop_scale
            self.crop = sampling.CropBoxes(sampling.box_draws(seed, epoch, index, sampling.CROP), (low, high))
        self.shift = sampling.shifts(seed, epoch, index, recipe.crop_padding)
        self.flip = sampling.flips(seed, epoch, index, recipe.hflip, recipe.alternate)
        self.auto = Auto(recipe, seed, epoch, index)

    def apply(self, row: int, picture: Picture, size: ImageSize) -> Tensor:
        """An image as (C, *size) uint8."""
        height, width = sides(size)
        if self.crop is not None:
            box = self.crop.box(row, picture.height, picture.width)
            image = resized(picture.pixels(box, size), [height, width])
        else:
            image = held_out(picture, size)
            if self.recipe.crop == "pad":
                top, left = self.shift[row].tolist()
                image = F.pad(image, (self.recipe.crop_padding,) * 4)[:, top : top + height, left : left + width]
        if self.flip[row]:
            image = image.flip(-1)
        return self.auto(row, image)


class Reader:
    """Fills slots of batch buffers with samples, in loader workers.

    It never raises for a sample: a worker's traceback is no message for a user.
    """

    def __init__(
        self, source: PhotoSource, images: Tensor, labels: Tensor, recipe: Recipe, plain: bool = False
    ) -> None:
        """`images` (slots, rows, H, W, C) uint8 and `labels` (slots, rows, ...) are the buffers; `plain` inputs, which
        are no images, are buffered as the data set returns them."""
        self.source, self.images, self.labels, self.plain = source, images, labels, plain
        self.augment, self.seed, self.skip = recipe.augment, recipe.seed, recipe.data.on_error == "skip"
        self.channels = images.shape[-1]
        self.size: Any = images.shape[2:4]  # of images
        self.draws = not isinstance(source, LabelledSource)  # a user's own, which may draw at random
        self.pictures = source if isinstance(source, PictureSource) else None

    def fill(self, slot: int, epoch: int | None, index: Array) -> Report:
        """Read the samples of a `Key`."""
        images, labels = self.images[slot], self.labels[slot]
        before = self._uncached
        with private_draws(), self._generators.restored():
            report = (
                self._evaluation(images, labels, index)
                if epoch is None
                else self._training(images, labels, epoch, index)
            )
        return report._replace(uncached=self._uncached - before)

    @cached_property
    def _generators(self) -> Generators:
        """The data set's own. First asked for in the process that reads, which has its own copy of them."""
        return Generators(getattr(self.source, "items", self.source) if self.draws else None)

    @property
    def _uncached(self) -> int:
        return int(getattr(self.source, "uncached", 0))

    def _training(self, images: Tensor, labels: Tensor, epoch: int, index: Array) -> Report:
        draws = PhotoDraws(self.augment, self.seed, epoch, index)
        failures: list[Unreadable] = []
        for row, place in enumerate(index.tolist()):
            # Where skipping is allowed, the next one that can be read takes the place of one that cannot.
            for step in range(NEIGHBOURS if self.skip else 1):
                image, label, failed = self._try(place + step, epoch, partial(draws.apply, row, size=self.size))
                failures += failed if step == 0 else []
                if image is not None:
                    break
            else:
                return Report(0, failures, end=True)
            images[row] = image
            labels[row] = label
        return Report(len(index), failures)

    def _evaluation(self, images: Tensor, labels: Tensor, index: Array) -> Report:
        failures: list[Unreadable] = []
        row = 0
        for sample in index.tolist():
            image, label, failed = self._try(sample, 0, partial(held_out, size=self.size))
            failures += failed
            if image is None:
                if not self.skip:
                    return Report(0, failures, end=True)
                continue
            images[row] = image
            labels[row] = label
            row += 1
        images[row:] = images[row - 1] if row else 0
        labels[row:] = labels[row - 1] if row else 0
        return Report(row, failures)

    def _try(
        self, place: int, epoch: int, prepare: Callable[[Picture], Tensor]
    ) -> tuple[Tensor | None, Tensor | int, list[Unreadable]]:
        """The sample at a place of the epoch's order, modulo the samples (`sampling.balanced`), as it is buffered."""
        sample = place % len(self.source)
        try:
            if self.pictures is not None:
                picture, label = self.pictures.open(sample, self.channels)
                return prepare(picture).permute(1, 2, 0), label, []
            if self.draws:
                self._generators.seed(seed_draws(self.seed, epoch, place))
            image, label = self.source.read(sample, self.channels)
            return image if self.plain else prepare(Picture.of(image)).permute(1, 2, 0), label, []
        except Exception as error:  # decoders and users' data sets raise anything at all
            return None, 0, [(self.source.where(sample), reason(error))]


def as_pictures(datasets: Datasets, inputs: Tensor) -> Tensor | None:
    """A batch's inputs (n, C, H, W) as uint8 (n, H, W, 1 or 3), not normalised; None where they are not images."""
    if datasets.plain or inputs.dim() != 4:
        return None
    mean, std = (torch.tensor(part)[:, None, None] for part in (datasets.mean, datasets.std))
    pixels = inputs.detach().float().cpu() * std + mean
    images = (255 * pixels).round().clamp(0, 255).to(torch.uint8)
    # The first three channels, or one of two.
    return images[:, : 3 if images.shape[1] >= 3 else 1].permute(0, 2, 3, 1).contiguous()

"""Reading of photos in a loader worker: from a sample index to a uint8 image of the right size.

`as_pictures` converts the inputs of a model back to images that can be displayed.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import functional as vision

from trainer.data import sampling
from trainer.data.augment import Auto
from trainer.data.generators import Generators
from trainer.data.photos.decoding import describe_failure
from trainer.data.photos.lazy_images import Picture
from trainer.data.sampling import Array
from trainer.data.sets import Datasets, ImageSet, LabelledSource, PhotoSource, PictureSource
from trainer.data.transforms import Transforms
from trainer.devices.cuda_graphs import host_random_states, set_host_random_states
from trainer.recipe import AugmentRecipe, Recipe
from trainer.recipe.image_sizes import ImageSize, sides, typed_size

# The model's images are tiny if their longer side has at most this number of pixels. For evaluation
# on tiny images, a photo is resized so that it just covers the image. For other sizes, the photo is
# resized to a larger size, and its center is cropped (`compute_shorter_side`).
TINY = 64
# Default of data.interpolation.
BILINEAR = "bilinear"
# Values of data.interpolation -> torchvision's names. `nearest-exact` chooses the same pixels as
# Pillow, and `nearest` does not.
MODES = {
    BILINEAR: vision.InterpolationMode.BILINEAR,
    "bicubic": vision.InterpolationMode.BICUBIC,
    "nearest": vision.InterpolationMode.NEAREST_EXACT,
}
# Whether torch resizes uint8 on this CPU without a conversion to float.
VECTORISED = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
# Maximum number of samples to try, starting with the requested sample, until one can be read.
NEIGHBOURS = 100

# (reader, epoch, index) of a batch: number of the reader; number of the epoch, or None in
# evaluation; and sample indices. In training, an index i may exceed the number of samples, and then
# means sample i % (number of samples) (`sampling.draw_balanced_permutation`).
Key = tuple[int, int | None, Array]
# Name of a sample that could not be read, and the reason.
Unreadable = tuple[str, str]


class Report(NamedTuple):
    """The result of filling a slot.

    Attributes:
        rows: number of rows that are not padding.
        failures: samples that could not be read.
        end: whether the run must end because of the first failure.
        uncached: number of photos that the cache lacked.
        encoded: rows that contain the bytes of a JPEG, and the number of bytes. See `gpu_decoding`.
    """

    rows: int
    failures: list[Unreadable]
    end: bool = False
    uncached: int = 0
    encoded: Sequence[tuple[int, int]] = ()


def prepare_for_evaluation(
    picture: Picture,
    size: ImageSize,
    shorter: ImageSize | None = None,
    interpolation: str = BILINEAR,
) -> Tensor:
    """Prepare a photo for evaluation: resize it to just cover `shorter`, and crop the center.

    Both evaluation and prediction use this function, so their pixels are the same. The image is not
    decoded larger than needed.

    Args:
        picture: the photo.
        size: size of the crop in pixels.
        shorter: the size to cover; by default `compute_shorter_side(size)`.
        interpolation: the recipe's data.interpolation.
    """
    shorter = shorter or compute_shorter_side(size)
    return resize_and_center_crop(picture.whole(shorter), size, shorter, interpolation)


def resize_and_center_crop(
    images: Tensor,
    size: ImageSize,
    shorter: ImageSize,
    interpolation: str,
) -> Tensor:
    """Resize images (..., C, H, W) to just cover `shorter`, and crop `size` from the center."""
    height, width = images.shape[-2:]
    new_size = covering_size(height, width, shorter)
    if new_size != (height, width):
        images = resize(images, [*new_size], interpolation)
    return vision.center_crop(images, [*sides(size)])  # type: ignore[no-any-return]


def covering_size(
    height: int,
    width: int,
    box: ImageSize,
) -> tuple[int, int]:
    """Return the smallest (height, width) that has the proportions of an image and covers `box`.

    If the box is a square, its side becomes the shorter side of the result, as in torchvision's
    Resize(side).
    """
    box_height, box_width = sides(box)
    if box_height * width >= box_width * height:
        return box_height, int(box_height * width / height)
    return int(box_width * height / width), box_width


def compute_shorter_side(size: ImageSize) -> ImageSize:
    """Return the size that a resized photo must cover before `size` is cropped for evaluation.

    The result is `size` / 0.875, or `size` itself if no side is longer than `TINY`. For an int, the
    result is an int: the length of the photo's shorter side.
    """
    if max(sides(size)) <= TINY:
        return size
    if isinstance(size, int):
        return round(size / 0.875)
    height, width = size
    return (round(height / 0.875), round(width / 0.875))


def evaluation_shorter_side(data: Datasets) -> ImageSize:
    """Return data.resize, or else `compute_shorter_side`, for the validation images of a data set.

    For images in memory, and for images with a target for each pixel, the result is their own size.
    """
    if isinstance(data.val, ImageSet) or len(data.targets.shape) > 1:
        return data.image_size
    return data.resize or compute_shorter_side(data.image_size)


def resize(
    image: Tensor,
    size: list[int],
    interpolation: str = BILINEAR,
) -> Tensor:
    """Resize images (..., C, H, W) as torchvision does, with antialiasing unless it is `nearest`.

    `size` is [height, width], or [length] of the shorter side.
    """
    mode = MODES[interpolation]
    if image.dim() > 3:
        return vision.resize(image, size, mode, antialias=True)  # type: ignore[no-any-return]
    # Keep the memory format channels_last, in which JPEG is decoded and batches are stored, so that
    # resizing and copying are faster.
    whole = image[None].contiguous(memory_format=torch.channels_last)
    is_fast = len(size) == 2 and VECTORISED and image.dtype == torch.uint8
    if not is_fast or image.is_cuda or image.shape[1:] == (*size,) or interpolation != BILINEAR:
        return vision.resize(whole, size, mode, antialias=True)[0]  # type: ignore[no-any-return]
    # torchvision calls the same function, but its checks of arguments take a quarter of the time of
    # a small image. Set the stride of the first dimension, because torch may otherwise return
    # another memory format (pytorch/pytorch#68430).
    strides = (whole.numel(), *whole.stride()[1:])
    whole = whole.as_strided(whole.shape, strides)
    return F.interpolate(whole, size, mode="bilinear", antialias=True)[0]


def seed_draws(
    seed: int,
    epoch: int,
    sample: int,
) -> int:
    """Seed torch, NumPy and random before a user's data set reads a sample in an epoch.

    Returns:
        A seed for generators that belong to the data set.
    """
    key = int(sampling.draw_bits(seed, epoch, sample, sampling.ITEM)[0])
    torch.default_generator.manual_seed(key >> 1)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    return key


@contextmanager
def private_draws() -> Iterator[None]:
    """Context manager that restores the random states of Python, NumPy and torch at its end."""
    host_states = host_random_states()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        set_host_random_states(*host_states)


class PhotoDraws:
    """Random augmentation of the photos of a batch, in a loader worker."""

    def __init__(
        self,
        recipe: AugmentRecipe,
        seed: int,
        epoch: int,
        index: Array,
        shorter: ImageSize | None = None,
        interpolation: str = BILINEAR,
    ) -> None:
        """Draw for the samples `index`.

        Args:
            recipe: the section `augment`.
            seed: seed of the run.
            epoch: the epoch.
            index: indices of the samples.
            shorter: size that a photo covers before its center is cropped, unless a random part is
                enlarged; by default `compute_shorter_side`.
            interpolation: the recipe's data.interpolation.
        """
        self.recipe = recipe
        self.shorter = shorter
        self.interpolation = interpolation
        self.crop: sampling.CropBoxes | None = None
        if recipe.crop == "resized":
            draws = sampling.draw_boxes(seed, epoch, index, sampling.CROP)
            self.crop = sampling.CropBoxes(draws, recipe.crop_scale)
        self.shift = sampling.draw_shifts(seed, epoch, index, recipe.crop_padding)
        self.flip = sampling.draw_flips(
            seed,
            epoch,
            index,
            recipe.hflip,
            recipe.alternate,
        )
        self.vflip = sampling.draw_uniform(seed, epoch, index, sampling.VFLIP) < recipe.vflip
        self.auto = Auto(recipe, seed, epoch, index)
        self.transforms = Transforms(recipe, seed, epoch, index)

    def apply(
        self,
        row: int,
        picture: Picture,
        size: ImageSize,
    ) -> Tensor:
        """Return the photo of row `row` after augmentation, (C, *size) uint8."""
        height, width = sides(size)
        if self.crop is not None:
            box = self.crop.box(row, picture.height, picture.width)
            image = resize(picture.pixels(box, size), [height, width], self.interpolation)
        else:
            image = prepare_for_evaluation(picture, size, self.shorter, self.interpolation)
            if self.recipe.crop == "pad":
                top, left = self.shift[row].tolist()
                padded = F.pad(image, (self.recipe.crop_padding,) * 4)
                image = padded[:, top : top + height, left : left + width]
        if self.flip[row]:
            image = image.flip(-1)
        if self.vflip[row]:
            image = image.flip(-2)
        return self.transforms(row, self.auto(row, image))


class PhotoPreparation:
    """Preparation of the photos of a source, in training and in evaluation."""

    def __init__(self, recipe: Recipe, size: ImageSize) -> None:
        """Prepare images of `size` pixels."""
        self._augment = recipe.augment
        self._seed = recipe.seed
        self._size = size
        self._interpolation = recipe.data.interpolation
        self._shorter = typed_size(recipe.data.resize)
        # data.resize is what an image of data.image_size is cropped from.
        same_size = recipe.data.train_size in (None, recipe.data.image_size)
        self._training_shorter = self._shorter if same_size else None

    def build(self, epoch: int | None, index: Array) -> Callable[[int, Picture], Tensor]:
        """Return the function that prepares a row's photo as (C, H, W) uint8, for a `Key`."""
        if epoch is None:
            return lambda row, picture: prepare_for_evaluation(
                picture, self._size, self._shorter, self._interpolation
            )
        draws = PhotoDraws(
            self._augment, self._seed, epoch, index, self._training_shorter, self._interpolation
        )
        return partial(draws.apply, size=self._size)


class Reader:
    """Fills slots of batch buffers with samples, in a loader worker.

    If a sample cannot be read, the failure is part of the report. An exception with a worker's
    traceback would not help the user.
    """

    def __init__(
        self,
        source: PhotoSource,
        images: Tensor,
        labels: Tensor,
        recipe: Recipe,
        plain: bool,
        keep_jpegs: bool = False,
    ) -> None:
        """Read from `source` into two buffers.

        Args:
            source: the samples.
            images: (slots, rows, H, W, C) uint8.
            labels: (slots, rows, ...).
            recipe: the recipe.
            plain: whether inputs are not images. If True, they are copied to the buffers as the
                data set returns them.
            keep_jpegs: whether to copy a JPEG to the buffer as it is, if it has no more bytes than
                its pixels there.
        """
        self.source = source
        self.images = images
        self.labels = labels
        self.plain = plain
        self.most_bytes = images[0, 0].numel() if keep_jpegs else 0
        self.seed = recipe.seed
        self.skip = recipe.data.on_error == "skip"
        self.channels = images.shape[-1]
        size: Any = images.shape[2:4]
        self.preparation = PhotoPreparation(recipe, size)
        # Only a user's own data set can draw random numbers while it is read.
        self.draws = not isinstance(source, LabelledSource)
        self.pictures = source if isinstance(source, PictureSource) else None

    def fill(
        self,
        slot: int,
        epoch: int | None,
        index: Array,
    ) -> Report:
        """Read the samples of a `Key` into a slot.

        With data.on_error=skip, an unreadable sample is left out in evaluation. In training, the
        next readable sample replaces it.
        """
        images = self.images[slot]
        labels = self.labels[slot]
        before = self._uncached
        failures: list[Unreadable] = []
        encoded = []
        attempts = NEIGHBOURS if self.skip and epoch is not None else 1
        row = 0
        with private_draws(), self._generators.restored():
            prepare = self.preparation.build(epoch, index)
            for place in index.tolist():
                for step in range(attempts):
                    image, label, failed = self._read(
                        place + step, epoch or 0, partial(prepare, row)
                    )
                    if step == 0:
                        failures += failed
                    if image is not None:
                        break
                if image is not None:
                    if image.dim() == 1:
                        images[row].view(-1)[: len(image)] = image
                        encoded.append((row, len(image)))
                    else:
                        images[row] = image
                    labels[row] = label
                    row += 1
                elif epoch is not None or not self.skip:
                    return Report(0, failures, True, self._uncached - before)
        # Padding repeats the last sample.
        images[row:] = images[row - 1] if row else 0
        labels[row:] = labels[row - 1] if row else 0
        return Report(row, failures, uncached=self._uncached - before, encoded=encoded)

    @cached_property
    def _generators(self) -> Generators:
        """The random generators of the data set.

        The search takes place in the process that reads, which has its own copy of the data set.
        """
        return Generators(getattr(self.source, "items", self.source) if self.draws else None)

    @property
    def _uncached(self) -> int:
        return int(getattr(self.source, "uncached", 0))

    def _read(
        self,
        place: int,
        epoch: int,
        prepare: Callable[[Picture], Tensor],
    ) -> tuple[Tensor | None, Tensor | int, list[Unreadable]]:
        """Return the image and label at `place` of the epoch's order, and the failure, if any.

        The index of the sample is `place` modulo the number of samples
        (`sampling.draw_balanced_permutation`). The image has the layout of the buffer. It is 1-dim
        if it is an encoded JPEG, and None if the sample cannot be read.
        """
        sample = place % len(self.source)
        try:
            if self.pictures is not None:
                picture, label = self.pictures.open(sample, self.channels)
                if picture.jpeg is not None and len(picture.jpeg) <= self.most_bytes:
                    return picture.jpeg, label, []
                return prepare(picture).permute(1, 2, 0), label, []
            if self.draws:
                self._generators.seed(seed_draws(self.seed, epoch, place))
            image, label = self.source.read(sample, self.channels)
            if not self.plain:
                image = prepare(Picture.of(image)).permute(1, 2, 0)
            return image, label, []
        except Exception as error:
            # Decoders and users' data sets can raise any exception.
            return None, 0, [(self.source.where(sample), describe_failure(error))]


def as_pictures(datasets: Datasets, inputs: Tensor) -> Tensor | None:
    """Convert normalized inputs (n, C, H, W) back to pictures (n, H, W, 1 or 3) uint8.

    Returns None for inputs that are not images.
    """
    if datasets.plain or inputs.dim() != 4:
        return None
    mean = torch.tensor(datasets.mean)[:, None, None]
    std = torch.tensor(datasets.std)[:, None, None]
    pixels = inputs.detach().float().cpu() * std + mean
    images = (255 * pixels).round().clamp(0, 255).to(torch.uint8)
    return select_channels(images.permute(0, 2, 3, 1))


def select_channels(images: Tensor) -> Tensor:
    """Return images (n, H, W, C) with only their first three channels; if C < 3, only the first."""
    channels = 3 if images.shape[-1] >= 3 else 1
    return images[..., :channels].contiguous()

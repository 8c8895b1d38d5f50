"""Sets of images that lie in memory, brought to the recipe's channels and size once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor
from torchvision.transforms.v2 import functional as vision

from trainer.data.folders.photo_folders import statistics
from trainer.data.photos.decoding import with_channels
from trainer.data.sets import Datasets, ImageSet
from trainer.errors import RecipeError
from trainer.recipe import DataRecipe


def in_memory(
    data: DataRecipe,
    train: Sequence[Tensor],
    val: Sequence[Tensor],
    classes: tuple[str, ...],
    known: tuple[tuple[float, ...], tuple[float, ...]],
    split: str,
) -> Datasets:
    """A data set of two pairs of images (N, C, H, W) uint8 and targets (N, ...).

    Raises:
        RecipeError: images of another shape than the recipe can have.
    """
    channels = data.channels or train[0].shape[1]
    height, width = train[0].shape[-2:]
    if data.image_size is None and height != width:
        raise RecipeError(
            f"data.name={data.name}: images of {height} x {width} are not square; "
            f"set data.image_size={max(height, width)}"
        )
    size = data.image_size or int(height)

    def made(pair: Sequence[Tensor]) -> ImageSet:
        images = with_channels(pair[0], channels)
        if images.shape[-2:] != (size, size):
            if pair[1].dim() > 2:
                raise RecipeError(
                    f"data.name={data.name}: its images are {' x '.join(map(str, images.shape[-2:]))} and would become "
                    f"{size} x {size}, and its targets, of {' x '.join(map(str, pair[1].shape[1:]))}, would not follow"
                )
            images = cast(Tensor, vision.resize(images, [size, size], antialias=True))
        return ImageSet(images, pair[1])

    mean, std = statistics(*known, channels)
    parts, sources = (made(train), made(val)), (train, val)
    return Datasets(data.name, *parts, classes, channels, size, mean, std, False, split, sources=sources)

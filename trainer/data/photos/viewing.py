"""Samples as pictures, from a model's inputs or read anew."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.photo_reader import held_out
from trainer.data.sets import Datasets, ImageSet, PictureSource, TensorSet


def as_pictures(datasets: Datasets, inputs: Tensor) -> Tensor | None:
    """A batch's inputs (n, C, H, W) as uint8 (n, H, W, 1 or 3), not normalised; None where they are not images."""
    if datasets.plain or inputs.dim() != 4:
        return None
    mean, std = (torch.tensor(part)[:, None, None] for part in (datasets.mean, datasets.std))
    pixels = inputs.detach().float().cpu() * std + mean
    return _visible((255 * pixels).round().clamp(0, 255).to(torch.uint8))


def held_out_pictures(datasets: Datasets, index: Sequence[int]) -> Tensor | None:
    """Held-out samples by their indices, as (n, H, W, 1 or 3) uint8, cut as for evaluation; None as above."""
    part = datasets.val
    if datasets.plain or isinstance(part, TensorSet) or not index:
        return None
    if isinstance(part, ImageSet):
        return _visible(part.images[[place % len(part.labels) for place in index]])
    channels, size = datasets.channels, datasets.image_size
    if isinstance(part, PictureSource):
        images = [held_out(part.open(place, channels)[0], size) for place in index]
    else:
        images = [held_out(Picture.of(part.read(place, channels)[0]), size) for place in index]
    return _visible(torch.stack(images))


def _visible(images: Tensor) -> Tensor:
    """(n, C, H, W) -> (n, H, W, 1 or 3): the first of other numbers of channels."""
    return images[:, : 3 if images.shape[1] == 3 else 1].permute(0, 2, 3, 1).contiguous()

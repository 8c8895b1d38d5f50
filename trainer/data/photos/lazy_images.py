"""Images that are decoded lazily, and no larger than needed.

A photo of 12 megapixels that becomes 224 x 224 has a hundred times the pixels that are used. JPEG stores blocks of
8 x 8 frequencies: from fewer of them a decoder makes an image of 1/2, 1/4 or 1/8 of the size (libjpeg's scale_denom).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from trainer.recipe.image_sizes import ImageSize, sides

Box = tuple[int, int, int, int]  # top, left, height, width, in pixels of the whole image

FACTORS = (8, 4, 2)  # by which a decoder may scale an image down
LONGEST = 1000  # times the shorter side: what is longer would fill the memory once it is enlarged
FINE = 128  # pixels along a side that are decoded at least: a box begins at a whole pixel


@dataclass(frozen=True)
class Picture:
    """An image, upright."""

    height: int  # of the whole image in pixels
    width: int
    # from a factor of `FACTORS`, or 1, to the image as (C, h, w) uint8. With factor 1 it has its full size, or the
    # size in which it is stored; with others it may be smaller by no more than that factor
    decode: Callable[[int], Tensor]

    def pixels(self, box: Box, least: ImageSize) -> Tensor:
        """A box as (C, h, w) uint8, of at least `least` and `FINE` pixels along each side where it has so many.

        Raises whatever decoding raises.
        """
        most = min(have // max(need, FINE) for have, need in zip(box[2:], sides(least), strict=True))
        factor = next((factor for factor in FACTORS if factor <= most), 1)
        image = self.decode(factor)
        top, height = _scaled(box[0], box[2], image.shape[1], self.height)
        left, width = _scaled(box[1], box[3], image.shape[2], self.width)
        return image[:, top : top + height, left : left + width]

    def whole(self, least: ImageSize) -> Tensor:
        """All of it, as `pixels`. Raises ValueError too."""
        if max(self.height, self.width) > LONGEST * min(self.height, self.width):
            raise ValueError(f"{self.width} x {self.height} pixels are a stripe, no photo: cut it")
        return self.pixels((0, 0, self.height, self.width), least)

    @classmethod
    def of(cls, image: Tensor) -> Picture:
        """An image (C, H, W) that is decoded already."""
        return cls(image.shape[1], image.shape[2], lambda _: image)


def _scaled(start: int, length: int, now: int, before: int) -> tuple[int, int]:
    """An interval on a side of `before` pixels, scaled to `now` pixels."""
    if now == before:
        return start, length
    first = min(round(start * now / before), now - 1)
    return first, max(1, round((start + length) * now / before) - first)

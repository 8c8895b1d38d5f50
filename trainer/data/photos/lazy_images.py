"""Images that are decoded lazily, and no larger than needed.

A photo of 12 megapixels has over a hundred times as many pixels as the image of 224 x 224 to which
it is resized. JPEG stores frequencies of blocks of 8 x 8 pixels. From only the lowest frequencies,
a decoder can compute an image of 1/2, 1/4 or 1/8 of the size (libjpeg's scale_denom).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from trainer.data.sampling import Box
from trainer.recipe.image_sizes import ImageSize, sides

# Denominators of the scales at which a JPEG decoder can read an image.
FACTORS = (8, 4, 2)
# Maximum ratio of the longer side to the shorter one. `Picture.whole` refuses a more elongated
# image, which would fill the memory when its shorter side is enlarged.
LONGEST = 1000
# Minimum number of pixels to decode along a side of a box. The position of a box is rounded to a
# whole pixel of the decoded image. With fewer pixels, rounding would shift the box noticeably.
FINE = 128


@dataclass(frozen=True)
class Picture:
    """An image that is decoded on demand. The decoded image is upright.

    Attributes:
        height: height of the whole image in pixels.
        width: width of the whole image in pixels.
        decode: function that decodes the image to (C, h, w) uint8. The argument is a factor of
            `FACTORS`, or 1. With factor 1, the result has the full size of the image, or the
            size in which a cache stores it. With another factor, the result may be smaller, but
            each side has at least about 1 / factor of its full length.
        jpeg: the bytes of an upright JPEG, gray or RGB, (n,) uint8; None for all other images.
    """

    height: int
    width: int
    decode: Callable[[int], Tensor]
    jpeg: Tensor | None = None

    def pixels(self, box: Box, least: ImageSize) -> Tensor:
        """Decode a box of the image to (C, h, w) uint8, at a reduced size if possible.

        Each side of the result has at least `FINE` pixels and at least as many pixels as `least`,
        unless the box itself has fewer.

        Raises:
            Exception: decoding can raise any exception.
        """
        box_top, box_left, box_height, box_width = box
        least_height, least_width = sides(least)
        largest = min(box_height // max(least_height, FINE), box_width // max(least_width, FINE))
        factor = next((factor for factor in FACTORS if factor <= largest), 1)
        image = self.decode(factor)
        top, height = _scale_interval(box_top, box_height, image.shape[1], self.height)
        left, width = _scale_interval(box_left, box_width, image.shape[2], self.width)
        return image[:, top : top + height, left : left + width]

    def whole(self, least: ImageSize) -> Tensor:
        """Decode the whole image, as `pixels` does.

        Raises:
            ValueError: one side is over `LONGEST` times as long as the other.
        """
        if max(self.height, self.width) > LONGEST * min(self.height, self.width):
            raise ValueError(
                f"{self.width} x {self.height} pixels are a stripe, not a photo: cut it into parts"
            )
        return self.pixels((0, 0, self.height, self.width), least)

    @classmethod
    def of(cls, image: Tensor) -> Picture:
        """Wrap an image (C, H, W) that is already decoded."""
        return cls(image.shape[1], image.shape[2], lambda _: image)


def _scale_interval(
    start: int,
    length: int,
    new_side: int,
    old_side: int,
) -> tuple[int, int]:
    """Scale an interval (start, length) on a side of `old_side` pixels to `new_side` pixels."""
    if new_side == old_side:
        return start, length
    first = min(round(start * new_side / old_side), new_side - 1)
    end = round((start + length) * new_side / old_side)
    return first, max(1, end - first)

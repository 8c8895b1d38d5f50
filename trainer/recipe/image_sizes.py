"""Sizes of images: pixels along each side of a square, or (height, width)."""

from collections.abc import Sequence

from trainer.errors import RecipeError
from trainer.recipe.text import format_value

# Length of the sides of a square in pixels, or (height, width). A square is always stored as a
# single number.
ImageSize = int | tuple[int, int]


def sides(size: ImageSize) -> tuple[int, int]:
    """Return (height, width)."""
    if isinstance(size, int):
        return size, size
    return size


def typed_size(value: int | Sequence[int] | None) -> ImageSize | None:
    """Convert a size from a recipe or file, and replace a list [height, width] by a tuple.

    A number and None are returned unchanged.
    """
    if isinstance(value, int | None):
        return value
    return (value[0], value[1])


def in_pixels(size: ImageSize) -> str:
    """Format a size, as in 224 x 320."""
    return " x ".join(map(str, sides(size)))


def check_resize(resize: ImageSize, size: ImageSize) -> None:
    """Refuse a `data.resize` from which `size` cannot be cropped, or that is over twice as large.

    Raises:
        RecipeError: it is refused.
    """
    for whole, crop in zip(sides(resize), sides(size), strict=True):
        if not crop <= whole <= 2 * crop:
            height, width = (round(side / 0.875) for side in sides(size))
            fitting = f"{height}" if height == width else f"[{height},{width}]"
            raise RecipeError(
                f"data.resize={format_value(resize)} must cover the {in_pixels(size)} pixels that "
                f"are cropped from it, and at most twice their sides; try data.resize={fitting}"
            )


def square(size: ImageSize) -> int:
    """Return the side of a square, for models that accept only squares.

    Raises:
        AssertionError: `size` is not a square.
    """
    if not isinstance(size, int):
        raise AssertionError(f"it takes squares, not {in_pixels(size)}")
    return size

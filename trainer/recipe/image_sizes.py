"""Sizes of images: pixels along each side of a square, or (height, width)."""

from __future__ import annotations

from collections.abc import Sequence

ImageSize = int | tuple[int, int]  # a square is a number: recipes, files and models of users have it so


def sides(size: ImageSize) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else size


def typed_size(value: int | Sequence[int] | None) -> ImageSize | None:
    """A size as recipes and files write it: a number, or [height, width]."""
    return value if isinstance(value, int | None) else (value[0], value[1])


def in_pixels(size: ImageSize) -> str:
    """As in 224 x 320."""
    return " x ".join(map(str, sides(size)))


def square(size: ImageSize) -> int:
    """The side of a square. Raises AssertionError of another size, for models that take no other."""
    if not isinstance(size, int):
        raise AssertionError(f"it takes squares, not {in_pixels(size)}")
    return size

"""Conversion of 16-bit and floating-point pixels to bytes.

The pixel values that become black and white are chosen once for a whole data set, by the recipe's
data.pixel_range or by the type of the pixels. They never depend on the values of a single image,
because a dark photo would then become as bright as a bright one.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from trainer.errors import SetupError
from trainer.recipe import DataRecipe
from trainer.recipe.recipe_files import format_argument
from trainer.recipe.unused import describe_unused

# (black, white): the pixel values that become the bytes 0 and 255.
Range = tuple[float, float]
Values = np.ndarray[Any, Any]

# Pixel values (black, white) of 16-bit integers and of floating-point numbers, used if
# data.pixel_range is not set.
WHOLE = (0.0, 65535.0)
REAL = (0.0, 1.0)
# Tolerance as a fraction of white: filters may overshoot slightly above white or below black.
BEYOND = 0.05
# If the brightest value of a data set is below white / DARK, the value of white is probably wrong,
# so `PixelValues.check` requires the user to set data.pixel_range.
DARK = 4
# Usual values of white: 1 for floating point, and the maxima of 8, 10, 12, 14 and 16 bits.
WHITES = (1, 255, 1023, 4095, 16383, 65535)
# Tags of a TIFF file.
BITS, PHOTOMETRIC, SAMPLES, PLANES, SAMPLE_FORMAT = 258, 262, 277, 284, 339


def recipe_pixel_range(data: DataRecipe) -> Range | None:
    """Return the recipe's data.pixel_range."""
    if data.pixel_range is None:
        return None
    return (data.pixel_range[0], data.pixel_range[1])


class PixelKind(NamedTuple):
    """The type of an image's pixels.

    Attributes:
        what: name of the type in messages, such as "16-bit numbers".
        natural: (black, white) pair of pixel values, used if data.pixel_range is not set.
        colour: whether the image has color channels of 16 bits. Pillow keeps only the upper 8 bits.
    """

    what: str
    natural: Range
    colour: bool = False


def find_pixel_kind(image: Image.Image) -> PixelKind | None:
    """Return the type of an image's pixels, or None if they are bytes.

    Call this before the image is loaded. Afterwards, Pillow no longer knows the type in the file.

    Raises:
        ValueError: the pixels are signed, have 12 or 32 bits, or have 16 bits and 0 means white.
        UnidentifiedImageError: the TIFF file stores each channel as a separate plane, and has more
            than 4 channels or more than 8 bits per channel, which Pillow misreads.
    """
    tags = getattr(image, "tag_v2", {})
    if tags.get(PLANES) == 2:
        has_many_samples = tags.get(SAMPLES, 1) > 4
        if has_many_samples or np.max(tags.get(BITS, 8)) > 8:
            raise UnidentifiedImageError
    is_signed = 2 in np.atleast_1d(tags.get(SAMPLE_FORMAT, 1))
    # Pillow also uses mode "I" for a PPM of 16 bits, which it scales to 0 to 65,535 by the maximum
    # in the file's header.
    has_32_bits = image.mode == "I" and image.format != "PPM"
    is_unusual = False
    if image.mode.startswith("I;16"):
        has_12_bits = 12 in np.atleast_1d(tags.get(BITS, 16))
        is_unusual = has_12_bits or tags.get(PHOTOMETRIC) == 0
    if is_signed or has_32_bits or is_unusual:
        raise ValueError(
            "its pixels are signed, have 12 or 32 bits, or have 16 bits in which 0 is white: save "
            "it as PNG of 8 or 16 bits"
        )
    if image.mode == "F":
        return PixelKind("real numbers", REAL)
    if image.mode.startswith("I"):
        return PixelKind("16-bit numbers", WHOLE)
    tile = getattr(image, "tile", None) or [None]
    if ";16" in str(getattr(tile[0], "args", "")):
        return PixelKind("16-bit numbers", WHOLE, colour=True)
    return None


def find_value_kind(values: Values) -> PixelKind | None:
    """Return the type of an array's pixels, or None if they are bytes.

    Raises:
        ValueError: the type of the array is not uint8, uint16 or floating point.
    """
    if values.dtype == np.uint8:
        return None
    if values.dtype.kind == "f":
        return PixelKind("real numbers", REAL)
    if (values.dtype.kind, values.dtype.itemsize) != ("u", 2):
        raise ValueError(
            f"its values are {values.dtype}: save them as uint8, uint16 or floating point"
        )
    return PixelKind("16-bit numbers", WHOLE)


def as_bytes(
    values: Values, kind: PixelKind, pixel_range: Range | None
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Convert pixel values to bytes.

    Values are scaled linearly, so that black becomes 0 and white becomes 255. Values outside this
    range are clipped, and NaN and infinity count as 0. Without a `pixel_range`, 16-bit integers are
    not scaled: their upper 8 bits are kept.

    Raises:
        ValueError: `pixel_range` is None, and values exceed the natural range of `kind` by more
            than the tolerance `BEYOND`.
    """
    # Pillow converts color images of 16 bits in the same way.
    if pixel_range is None and kind.natural == WHOLE:
        return (values >> 8).astype(np.uint8)
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    low = float(values.min(initial=0))
    high = float(values.max(initial=0))
    if pixel_range is None and is_beyond(low, high, kind.natural):
        raise ValueError(
            f"its pixels are {kind.what} from {low:g} to {high:g}: {suggest_range(low, high)}"
        )
    black, white = pixel_range or kind.natural
    scaled = (values.astype(np.float64) - black) * (255 / (white - black))
    return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)


def is_beyond(
    low: float,
    high: float,
    natural: Range,
) -> bool:
    """Return whether values from `low` to `high` exceed a range by more than the tolerance.

    Args:
        low: smallest value.
        high: largest value.
        natural: (black, white) pair of pixel values; black is 0.
    """
    white = natural[1]
    return low < -BEYOND * white or high > white * (1 + BEYOND)


def suggest_range(low: float, high: float) -> str:
    """Return the part of a message that suggests a data.pixel_range for `low` to `high`."""
    white = next((white for white in WHITES if high <= white * (1 + BEYOND)), high)
    if 0 < high < white / DARK:
        white = high
    black = 0.0
    if low < -BEYOND * white:
        black = low
        white = high
    return f"data.pixel_range=[{black:.7g},{white:.7g}] says which values are black and white"


class PixelValues:
    """Range of the pixel values in the inspected images of a data set.

    Attributes:
        wanted: the recipe's data.pixel_range; None if it is not set.
        count: number of images whose pixels are not bytes.
        animated: number of images with several frames, except TIFF files.
        holes: number of images with NaN or infinity.
        channels: names of the images by their number of channels. The number 0 stands for images
            that can be read with one or three channels.
    """

    def __init__(self, wanted: Range | None) -> None:
        self.wanted = wanted
        self.count = 0
        self.animated = 0
        self.holes = 0
        self.channels = defaultdict[int, list[str]](list)
        self._first: tuple[str, PixelKind] | None = None
        self._low = 0.0
        self._high = 0.0

    def add(self, image: Image.Image, where: str) -> None:
        """Add an image that is not loaded yet, and load it only if `seen` needs its values.

        Raises:
            ValueError: the pixels cannot be read.
        """
        kind = find_pixel_kind(image)
        self.channels[0].append(where)
        # `stacks.choose_page` checks the pages of a TIFF file when the file is read.
        if image.format != "TIFF" and getattr(image, "is_animated", False):
            self.animated += 1
        self.seen(kind, lambda: np.asarray(image), where)

    def seen(
        self,
        kind: PixelKind | None,
        load: Callable[[], Values],
        where: str,
    ) -> None:
        """Add the values of an image.

        Args:
            kind: type of the pixels; None for bytes, which have no range to check.
            load: function that returns the pixel values. It is called only if they can change the
                results of `check` and `notes`.
            where: name of the image for messages.
        """
        if kind is None:
            return
        self.count += 1
        self._first = self._first or (where, kind)
        if kind.natural == REAL and not np.isfinite(load()).all():
            self.holes += 1
        # After one 16-bit image that is bright enough, `check` accepts 16-bit images with any
        # values, so further images need not be loaded.
        is_bright = kind.natural == WHOLE and self._high >= WHOLE[1] / DARK
        if self.wanted is not None or is_bright:
            return
        values = load()
        if kind.colour:
            values = values.astype(np.uint16) << 8 | 255
        else:
            values = np.nan_to_num(values, posinf=0, neginf=0)
        self._low = min(self._low, float(values.min(initial=0)))
        self._high = max(self._high, float(values.max(initial=0)))

    def check(self, channels: int) -> None:
        """Check the number of channels and the pixel values of the images that were added.

        Raises:
            SetupError: no image can be read with `channels` channels. Or data.pixel_range is not
                set, and pixels exceed the natural range of their type or are very dark.
        """
        if self.channels and not {0, channels} & {*self.channels}:
            actual, names = max(self.channels.items(), key=lambda item: len(item[1]))
            total = sum(map(len, self.channels.values()))
            raise SetupError(
                f"{names[0]}: the number of channels is {actual} in {len(names)} of {total} "
                f"inspected images, but {channels} would be read: type data.channels={actual}"
            )
        if self._first is None or self.wanted is not None:
            return
        where, kind = self._first
        black, white = kind.natural
        start = (
            f"{where}: its pixels are {kind.what}, and the values of {self.count} inspected images "
            f"range from {self._low:g} to {self._high:g}"
        )
        if is_beyond(self._low, self._high, kind.natural):
            raise SetupError(f"{start}: {suggest_range(self._low, self._high)}")
        if 0 < self._high < white / DARK:
            remedy = "save them with 8 bits"
            if not kind.colour:
                remedy = suggest_range(self._low, self._high)
            keep = f"type data.pixel_range=[{black:g},{white:g}] if the images really are so dark"
            raise SetupError(f"{start} of {white:g}: {remedy}; {keep}")

    def notes(self) -> dict[str, str]:
        """Return notes for the run's banner, by title."""
        notes = {}
        if self._first:
            _, kind = self._first
            black, white = self.wanted or kind.natural
            text = f"are {kind.what}, of which {black:g} becomes black and {white:g} white"
            if self.holes > 0:
                text += f"; {self.holes} images have NaN or infinity, which count as 0"
            notes["pixels"] = text
        elif self.wanted is not None:
            argument = format_argument("data.pixel_range", [*self.wanted])
            notes["unused"] = describe_unused(argument, "images of 8 bits")
        if self.animated:
            notes["frames"] = (
                f"{self.animated} of the images inspected have several frames: the first is read"
            )
        return notes

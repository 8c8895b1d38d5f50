"""Pixels that are not bytes: which of their values are black and white.

That is one decision for a whole data set, the recipe's data.pixel_range, or follows from the kind of file. It never
follows from the values of one image, which would make a dark photo as bright as a bright one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from trainer.errors import SetupError
from trainer.recipe import DataRecipe

Range = tuple[float, float]  # what is black, what is white
Values = np.ndarray[Any, Any]

WHOLE, REAL = (0.0, 65535.0), (0.0, 1.0)  # of 16 bits, and of real numbers, unless the recipe says something else
BEYOND = 0.05  # of the range: filters may overshoot a little above white or below black
DARK = 4  # a set whose brightest value is below a fourth of white was hardly written with that white
WHITES = (1, 255, 1023, 4095, 16383, 65535)
BITS, PHOTOMETRIC, SAMPLES, PLANES, SAMPLE_FORMAT = 258, 262, 277, 284, 339  # a TIFF's tags


def wanted_of(data: DataRecipe) -> Range | None:
    """The recipe's data.pixel_range."""
    return None if data.pixel_range is None else (data.pixel_range[0], data.pixel_range[1])


class PixelKind(NamedTuple):
    """The type of an image's pixels."""

    what: str
    natural: Range  # black and white, unless the recipe says something else
    colour: bool = False  # 16 bits a channel, of which Pillow keeps the upper 8


def kind_of(image: Image.Image) -> PixelKind | None:
    """None for bytes. To be asked before the image is loaded. Raises ValueError for numbers that are not read here, and
    UnidentifiedImageError for planes that Pillow takes for others."""
    tags = getattr(image, "tag_v2", {})
    if tags.get(PLANES) == 2 and (tags.get(SAMPLES, 1) > 4 or np.max(tags.get(BITS, 8)) > 8):
        raise UnidentifiedImageError
    signed = 2 in np.atleast_1d(tags.get(SAMPLE_FORMAT, 1))
    long = image.mode == "I" and image.format != "PPM"  # which Pillow scales to 16 bits, by the white of each file
    odd = image.mode.startswith("I;16") and (12 in np.atleast_1d(tags.get(BITS, 16)) or tags.get(PHOTOMETRIC) == 0)
    if signed or long or odd:
        raise ValueError(
            "its pixels have a sign, or 12 or 32 bits, or 0 is white in 16 bits: save it as PNG of 8 or 16 bits"
        )
    if image.mode == "F":
        return PixelKind("real numbers", REAL)
    if image.mode.startswith("I"):
        return PixelKind("16-bit numbers", WHOLE)
    tile = getattr(image, "tile", None) or [None]
    return PixelKind("16-bit numbers", WHOLE, colour=True) if ";16" in str(getattr(tile[0], "args", "")) else None


def kind_of_values(values: Values) -> PixelKind | None:
    """The same of an array. Raises ValueError."""
    if values.dtype == np.uint8:
        return None
    if values.dtype.kind == "f":
        return PixelKind("real numbers", REAL)
    if (values.dtype.kind, values.dtype.itemsize) != ("u", 2):
        raise ValueError(f"its values are {values.dtype}: save them as uint8, uint16 or floating point")
    return PixelKind("16-bit numbers", WHOLE)


def as_bytes(values: Values, kind: PixelKind, wanted: Range | None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Values from 0 to 255, clipped to black and white. Raises ValueError."""
    if wanted is None and kind.natural == WHOLE:  # as Pillow does with colour
        return (values >> 8).astype(np.uint8)
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min(initial=0)), float(values.max(initial=0))
    if wanted is None and beyond(low, high, kind.natural):
        raise ValueError(f"its pixels are {kind.what} from {low:g} to {high:g}: {advice(low, high)}")
    black, white = wanted or kind.natural
    scaled = (values.astype(np.float64) - black) * (255 / (white - black))
    return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)


def beyond(low: float, high: float, natural: Range) -> bool:
    """Whether values lie outside of black to white."""
    return low < -BEYOND * natural[1] or high > natural[1] * (1 + BEYOND)


def advice(low: float, high: float) -> str:
    """What to type for values from `low` to `high`."""
    white = next((white for white in WHITES if high <= white * (1 + BEYOND)), high)
    white = white if high >= white / DARK or high <= 0 else high
    black, white = (0, white) if low >= -BEYOND * white else (low, high)
    return f"data.pixel_range=[{black:.7g},{white:.7g}] says which values are black and white"


class PixelValues:
    """The range of values in some images of a set."""

    def __init__(self, wanted: Range | None) -> None:
        self.wanted = wanted
        self.count = self.pages = 0  # images whose pixels are not bytes; TIFF files of several pages
        self.holes = 0  # images of which some pixels are no finite numbers
        self.channels = defaultdict[int, list[str]](list)  # images by theirs; 0: of one or three, read as either
        self._first: tuple[str, PixelKind] | None = None
        self._low = self._high = 0.0

    def add(self, image: Image.Image, where: str) -> None:
        """Look at an image that is not loaded yet; it is loaded where its values may matter. Raises ValueError."""
        kind = kind_of(image)
        self.channels[0].append(where)
        self.pages += image.format == "TIFF" and getattr(image, "n_frames", 1) > 1
        self.seen(kind, lambda: np.asarray(image), where)

    def seen(self, kind: PixelKind | None, load: Callable[[], Values], where: str) -> None:
        """Look at values of a kind."""
        if kind is None:
            return
        self.count += 1
        self._first = self._first or (where, kind)
        self.holes += kind.natural == REAL and not np.isfinite(load()).all()
        if self.wanted is not None or (kind.natural == WHOLE and self._high >= WHOLE[1] / DARK):
            return
        values = load()
        values = values.astype(np.uint16) << 8 | 255 if kind.colour else np.nan_to_num(values, posinf=0, neginf=0)
        self._low = min(self._low, float(values.min(initial=0)))
        self._high = max(self._high, float(values.max(initial=0)))

    def check(self, channels: int) -> None:
        """Refuse images that all have other channels, and values of which black and white are not known. Raises
        SetupError."""
        if self.channels and not {0, channels} & {*self.channels}:
            have, named = max(self.channels.items(), key=lambda each: len(each[1]))
            which = "all" if len(self.channels) == 1 else f"{len(named)} of"
            raise SetupError(
                f"{named[0]}: {which} {sum(map(len, self.channels.values()))} images looked at have {have} "
                f"channel{'s' * (have > 1)}, and {channels} would be read: type data.channels={have}"
            )
        if self._first is None or self.wanted is not None:
            return
        where, kind = self._first
        black, white = kind.natural
        seen = f"those of {self.count} images looked at reach from {self._low:g} to {self._high:g}"
        start = f"{where}: its pixels are {kind.what}, and {seen}"
        if beyond(self._low, self._high, kind.natural):
            raise SetupError(f"{start}: {advice(self._low, self._high)}")
        if 0 < self._high < white / DARK:
            whole = f"data.pixel_range=[{black:g},{white:g}] if they are so dark"
            remedy = "save them with 8 bits" if kind.colour else advice(self._low, self._high)
            raise SetupError(f"{start} of {white:g}: {remedy}; {whole}")

    def notes(self) -> dict[str, str]:
        """For a run's banner."""
        notes = {}
        if self._first is not None:
            kind = self._first[1]
            black, white = self.wanted or kind.natural
            notes["pixels"] = f"are {kind.what}, of which {black:g} becomes black and {white:g} white"
            notes["pixels"] += f"; {self.holes} images have NaN or infinity, which count as 0" * (self.holes > 0)
        elif self.wanted is not None:
            notes["pixels"] = "are bytes, which data.pixel_range does not change"
        if self.pages:
            notes["pages"] = f"{self.pages} of the images looked at have several pages: the first is read"
        return notes

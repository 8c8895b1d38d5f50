"""Pixels that are not bytes: which of their values are black and white.

That is one decision for a whole data set, the recipe's data.pixel_range, or follows from the kind of file. It never
follows from the values of one image, which would make a dark photo as bright as a bright one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from PIL import Image, TiffTags

from trainer.errors import SetupError
from trainer.recipe import DataRecipe

Range = tuple[float, float]  # what is black, what is white
Values = np.ndarray[Any, Any]

WHOLE, REAL = (0.0, 65535.0), (0.0, 1.0)  # of unsigned 16 bits, and of real numbers, unless something else is known
BEYOND = 0.05  # of the range: filters may overshoot a little above white or below black
DARK = 4  # a set whose brightest value is below a fourth of white was hardly written with that white
WHITES = (1, 255, 1023, 4095, 16383, 65535)
BITS, PHOTOMETRIC, SAMPLE_FORMAT = (
    next(number for number, tag in TiffTags.TAGS_V2.items() if tag.name == name)
    for name in ("BitsPerSample", "PhotometricInterpretation", "SampleFormat")
)


def wanted_of(data: DataRecipe) -> Range | None:
    """The recipe's data.pixel_range."""
    return None if data.pixel_range is None else (data.pixel_range[0], data.pixel_range[1])


class PixelKind(NamedTuple):
    """The type of an image's pixels; to be looked up before they are loaded."""

    natural: Range | None  # black and white by the kind of file; None where it does not say
    colour: bool = False  # 16 bits a channel, of which Pillow keeps the upper 8
    read_as: type[np.generic] | None = None  # the real type, where Pillow reads the bytes as another one
    inverted: bool = False  # 0 is white


def kind_of(image: Image.Image) -> PixelKind | None:
    """None for bytes."""
    tile = getattr(image, "tile", None) or [None]
    arguments = getattr(tile[0], "args", "")
    raw = str(arguments[0] if isinstance(arguments, tuple) and arguments else arguments)
    tags = getattr(image, "tag_v2", {})
    signed = 2 in np.atleast_1d(tags.get(SAMPLE_FORMAT, 1))
    if image.mode == "F":
        return PixelKind(REAL)
    if image.mode.startswith("I;16"):
        white = 4095.0 if 12 in np.atleast_1d(tags.get(BITS, 16)) else WHOLE[1]
        return PixelKind((0.0, white), inverted=tags.get(PHOTOMETRIC) == 0)
    if image.mode == "I":  # Pillow scales PPM's to 16 bits, by the white that each file says
        return PixelKind(WHOLE if image.format == "PPM" else None, read_as=None if signed or not tags else np.uint32)
    if signed:
        return PixelKind(None, read_as=np.int8)
    return PixelKind(WHOLE, colour=True) if ";16" in raw else None


def values_of(image: Image.Image, kind: PixelKind) -> Values:
    """Its pixels as numbers; of colour with 16 bits a channel, the upper 8."""
    values = np.asarray(image)
    values = values.view(kind.read_as) if kind.read_as is not None else values
    return values if kind.natural is None or not kind.inverted else np.asarray(kind.natural[1], values.dtype) - values


def as_bytes(values: Values, natural: Range | None, wanted: Range | None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Values from 0 to 255, clipped to black and white. Raises ValueError."""
    if wanted is None and natural == WHOLE:  # as Pillow does with colour
        return (values >> 8).astype(np.uint8)
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    ends = wanted or natural
    if wanted is None:
        low, high = float(values.min(initial=0)), float(values.max(initial=0))
        if ends is None or beyond(low, high, ends):
            raise ValueError(f"its pixels are {numbers(values)} from {low:g} to {high:g}: {advice(low, high)}")
    assert ends is not None
    black, white = ends
    scaled = (values.astype(np.float64) - black) * (255 / (white - black))
    return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)


def beyond(low: float, high: float, natural: Range) -> bool:
    """Whether values lie outside of black to white."""
    return low < -BEYOND * natural[1] or high > natural[1] * (1 + BEYOND)


def numbers(values: Values) -> str:
    return {"f": "real numbers", "u": f"{8 * values.dtype.itemsize}-bit numbers"}.get(
        values.dtype.kind, "whole numbers"
    )


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
        self._first = ""
        self._kind = PixelKind(None)
        self._what = ""
        self._low = self._high = 0.0

    def add(self, image: Image.Image, where: str) -> None:
        """Look at an image that is not loaded yet; it is loaded where its values may matter."""
        self.pages += image.format == "TIFF" and getattr(image, "n_frames", 1) > 1
        kind = kind_of(image)
        if kind is None:
            return
        self.count += 1
        bounded = kind.natural not in (None, REAL)
        if self.count > 1 and kind == self._kind and (self.wanted is not None or (bounded and not self._dark)):
            return
        values = values_of(image, kind)
        values = values.astype(np.uint16) << 8 | 255 if kind.colour else np.nan_to_num(values, posinf=0, neginf=0)
        if self.count == 1:
            self._first, self._kind, self._what = where, kind, numbers(values)
        self._low = min(self._low, float(values.min(initial=0)))
        self._high = max(self._high, float(values.max(initial=0)))

    @property
    def _dark(self) -> bool:
        return self._kind.natural is None or 0 < self._high < self._kind.natural[1] / DARK

    def check(self) -> None:
        """Refuse values of which black and white are not known. Raises SetupError."""
        if not self.count or self.wanted is not None:
            return
        natural, some = self._kind.natural, f"those of {self.count} images looked at reach from {self._low:g} to"
        start = f"{self._first}: its pixels are {self._what}, and {some} {self._high:g}"
        if natural is None or beyond(self._low, self._high, natural):
            raise SetupError(f"{start}: {advice(self._low, self._high)}")
        if not self._dark:
            return
        whole = f"data.pixel_range=[{natural[0]:g},{natural[1]:g}]"
        if self._kind.colour:
            raise SetupError(f"{start} of {natural[1]:g}: save them with 8 bits, or, if they are so dark, {whole}")
        raise SetupError(f"{start} of {natural[1]:g}: {advice(self._low, self._high)}; {whole} if they are so dark")

    def notes(self) -> dict[str, str]:
        """For a run's banner."""
        notes = {}
        if self.wanted is not None and not self.count:
            notes["pixels"] = "are bytes, which data.pixel_range does not change"
        elif self.count:
            black, white = self.wanted or self._kind.natural or WHOLE
            notes["pixels"] = f"are {self._what}, of which {black:g} becomes black and {white:g} white"
        if self.pages:
            notes["pages"] = f"{self.pages} of the images looked at have several pages: the first is read"
        return notes

"""Images of any number of channels: NumPy's arrays (.npy), and TIFF files of several bands or pages."""

from __future__ import annotations

import io
import math

import numpy as np

from trainer.data.photos.pixel_range import PixelKind, Values, kind_of_values
from trainer.recipe.field_types import MOST_CHANNELS

LARGEST = 2**30  # bytes of an image file, and of its pixels
NPY, TIFF = b"\x93NUMPY", (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # what files begin with
ORIENTATION = 274  # a TIFF's tag


def is_stack(start: bytes, channels: int | None) -> bool:
    """Whether the file that begins so is read here: all arrays, and all files for other channels than 1 and 3."""
    return start.startswith(NPY) or channels not in (None, 1, 3)


def read_stack(data: Values, channels: int | None) -> tuple[Values, PixelKind | None, int]:
    """The image (H, W, C) in the bytes of a file, the kind of its values, None for bytes, and its EXIF orientation.

    Arrays are (H, W) or (H, W, C); of a TIFF file the axis that is not height and width has the channels. `channels`
    is how many there must be. Raises ValueError.
    """
    start, turned = data[:6].tobytes(), 1
    if start.startswith(NPY):
        values = np.lib.format.read_array(io.BytesIO(data.data), allow_pickle=False)
        if values.ndim == 3 and 1 < len(values) == channels:
            raise ValueError(
                f"its shape is {values.shape}, and an array is height, width, channels: if its first axis has the "
                f"{channels} channels, save np.moveaxis(array, 0, -1), else save it as TIFF"
            )
    elif start.startswith(TIFF):
        try:
            values, turned = _tiff(data)
        except LookupError:  # it is damaged
            raise ValueError("cannot identify image file") from None
    elif channels in (None, 1, 3):
        raise ValueError("cannot identify image file")
    else:
        raise ValueError(f"images of data.channels={channels} are .npy and TIFF files, and it is neither")
    values = values[..., None] if values.ndim == 2 else values
    if values.ndim != 3 or not values.size or values.nbytes > LARGEST:
        raise ValueError(f"its shape is {values.shape}, not height, width and channels")
    have = values.shape[2]
    if have > MOST_CHANNELS:
        raise ValueError(f"it has {have} channels, and {MOST_CHANNELS} are the most")
    if channels not in (None, have):
        raise ValueError(f"it has {have} channel{'s' * (have > 1)}: data.channels={have} reads it, {channels} does not")
    return values, kind_of_values(values), turned


def _tiff(data: Values) -> tuple[Values, int]:
    """Height, width and channels, where there are several, whichever order the file has. Raises ValueError."""
    try:
        import tifffile
    except ImportError:
        raise ValueError("this kind of TIFF file is read by tifffile: pip install tifffile") from None
    with tifffile.TiffFile(io.BytesIO(data.data)) as file:
        first = file.pages.first
        series = [part for part in file.series if not part.keyframe.subfiletype & 5]  # smaller copies, and masks
        if len(series) != 1 or first.photometric in (0, 3):
            raise ValueError("its pages have several sizes, or 0 is white in it, or it has a palette")
        axes, shape = series[0].axes, series[0].shape
        others = [place for place, axis in enumerate(axes) if axis not in "YX" and shape[place] > 1]
        if "Y" not in axes or "X" not in axes or len(others) > 1:
            raise ValueError(f"its axes are {axes} of {shape}, not height, width and channels")
        if math.prod(shape) * series[0].dtype.itemsize > LARGEST:
            raise ValueError(f"{shape} pixels are more than an image has")
        order = [axes.index("Y"), axes.index("X"), *others]
        order += [place for place in range(len(axes)) if place not in order]
        values = series[0].asarray().transpose(order)
        return values.reshape(values.shape[: len(others) + 2]), int(first.tags.valueof(ORIENTATION, 1))

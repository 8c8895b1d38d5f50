"""Images of any number of channels: NumPy arrays, and TIFF files of several bands or pages."""

import io
import math
from contextlib import suppress

import numpy as np
from PIL import Image, UnidentifiedImageError

from trainer.data.photos.pixel_range import PixelKind, Values, find_value_kind
from trainer.errors import load_extra
from trainer.recipe.field_types import MOST_CHANNELS

# Maximum number of bytes of an image file, and of its pixels. Larger images are refused.
LARGEST = 2**30
# First bytes of files with arrays, and of TIFF files.
NPY = b"\x93NUMPY"
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# Tags of a TIFF file.
ORIENTATION, SUBFILE = 274, 254
# Bits of SUBFILE that mean that a page is a smaller copy of another page, or a mask.
SMALLER = 1 | 4


def is_stack(start: bytes, channels: int | None) -> bool:
    """Return whether this module reads a file without trying Pillow first.

    The result is True for .npy files, and for all files if `channels` is a number other than 1
    and 3.

    Args:
        start: the first 6 bytes of the file.
        channels: the expected number of channels; None accepts any number.
    """
    return start.startswith(NPY) or channels not in (None, 1, 3)


def read_stack(data: Values, channels: int | None) -> tuple[Values, PixelKind | None, int]:
    """Decode the bytes of an array or a TIFF file.

    Arrays are (H, W) or (H, W, C). The channels of a TIFF file are the axis that is neither height
    nor width.

    Args:
        data: the bytes of the file.
        channels: the expected number of channels; None accepts any number.

    Returns:
        (values, kind, orientation): the pixels (H, W, C), their type (None for bytes), and the EXIF
        orientation.

    Raises:
        ValueError: the file cannot be read, or has other channels.
    """
    start = data[:6].tobytes()
    orientation = 1
    if start.startswith(NPY):
        values = np.lib.format.read_array(io.BytesIO(data.data), allow_pickle=False)
        if values.ndim == 3 and 1 < len(values) == channels:
            raise ValueError(
                f"its shape is {values.shape}, but an array must be height, width, channels: if "
                f"its first axis has the {channels} channels, save np.moveaxis(array, 0, -1), else "
                "save it as TIFF"
            )
    elif start.startswith(TIFF):
        try:
            values, orientation = _read_tiff(data)
        except LookupError:
            # tifffile raises LookupError for damaged files.
            raise ValueError("cannot identify image file") from None
    elif channels in (None, 1, 3):
        raise ValueError("cannot identify image file")
    else:
        raise ValueError(
            f"it is neither .npy nor TIFF, the files that data.channels={channels} can read"
        )
    if values.ndim == 2:
        values = values[..., None]
    if values.ndim != 3 or not values.size or values.nbytes > LARGEST:
        raise ValueError(f"its shape is {values.shape}, not height, width and channels")
    actual = values.shape[2]
    if actual > MOST_CHANNELS:
        raise ValueError(f"it has {actual} channels, but at most {MOST_CHANNELS} are allowed")
    if channels not in (None, actual):
        raise ValueError(
            f"its number of channels is {actual}, but {channels} are expected: type "
            f"data.channels={actual} to read it"
        )
    return values, find_value_kind(values), orientation


def choose_page(image: Image.Image) -> None:
    """Select the page that contains the image in a TIFF file that Pillow opened.

    Pages that are smaller copies or masks are ignored.

    Raises:
        UnidentifiedImageError: the file has several gray pages, which are channels: use
            `read_stack`.
        ValueError: the file has several pages, and none says which is the image.
    """
    pages = {}
    # Stop at invalid data, which may follow the last page.
    with suppress(Exception):
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            if not image.tag_v2.get(SUBFILE, 0) & SMALLER:  # type: ignore[attr-defined]
                pages[number] = (image.mode, image.size)
    if len(pages) > 1:
        has_equal_pages = len({*pages.values()}) == 1
        is_gray = image.mode != "P" and len(image.getbands()) == 1
        if has_equal_pages and is_gray:
            raise UnidentifiedImageError
        raise ValueError(
            f"it has {len(pages)} pages, in colour or of several sizes: save one page as a "
            "separate file"
        )
    image.seek(next(iter(pages), 0))


def _read_tiff(data: Values) -> tuple[Values, int]:
    """Return the pixels of a TIFF file and its EXIF orientation.

    The axes of the result are height, width and, if there are several channels, channels. The order
    of the axes in the file does not matter.

    Raises:
        ValueError: the file has other axes, or pages that differ.
    """
    tifffile = load_extra("this kind of TIFF file", "tifffile")
    with tifffile.TiffFile(io.BytesIO(data.data)) as file:
        first = file.pages.first
        series = [part for part in file.series if not part.keyframe.subfiletype & SMALLER]
        if first.photometric in (0, 3):
            raise ValueError("0 is white in it, or it has a palette: save it in another format")
        if len({(part.axes, part.shape, part.dtype) for part in series}) != 1:
            raise ValueError(f"it has {len(series)} pages, of several sizes or types")
        axes = series[0].axes
        shape = series[0].shape
        if len(series) > 1:
            # Pages that were written separately are separate series. Stack them along a new axis.
            axes = f"Q{axes}"
            shape = (len(series), *shape)
        channel_axes = [
            number for number, axis in enumerate(axes) if axis not in "YX" and shape[number] > 1
        ]
        if "Y" not in axes or "X" not in axes or len(channel_axes) > 1:
            raise ValueError(f"its axes are {axes} of {shape}, not height, width and channels")
        if math.prod(shape) * series[0].dtype.itemsize > LARGEST:
            raise ValueError(f"its {shape} pixels are more than {LARGEST:,} bytes")
        order = [axes.index("Y"), axes.index("X"), *channel_axes]
        order += [number for number in range(len(axes)) if number not in order]
        pages = np.stack([part.asarray() for part in series])
        values = pages.reshape(shape).transpose(order)
        # The remaining axes have length 1.
        values = values.reshape(values.shape[: len(channel_axes) + 2])
        orientation = first.tags.valueof(ORIENTATION, 1)
        return values, int(orientation)

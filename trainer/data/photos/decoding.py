"""Decoding: from a file, a Pillow image or a user's item to a uint8 tensor."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor
from torchvision.transforms.v2 import functional as vision

from trainer.data.photos.jpeg import jpeg_pixels
from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.pixel_range import WHOLE, Range, as_bytes, kind_of
from trainer.data.photos.stacks import LARGEST, is_stack, read_stack
from trainer.errors import RecipeError, text_of
from trainer.saving import files

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# What Pillow may open, whatever a file's suffix is: its readers of other formats start programs (EPS: Ghostscript), or
# are rarely used and maintained. HEIF needs pillow-heif.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "HEIF", "JPEG2000")
XMP = b"http://ns.adobe.com/xap/1.0/\0"  # the beginning of a JPEG's segment of it
ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")  # Pillow's modes with transparency


def open_image(path: str, channels: int, pixel_range: Range | None = None) -> Picture:
    """A file's image, upright: turned as its EXIF orientation says.

    `pixel_range` is the recipe's data.pixel_range. torchcodec decodes JPEG, which is twice as fast; Pillow decodes
    other kinds, JPEGs that torchcodec refuses, and JPEGs that are decoded at a smaller size.

    Raises:
        OSError, ValueError, RuntimeError: it cannot be read; so does decoding.
    """
    return open_encoded(read_file(path), channels, pixel_range)


def read_file(path: str | bytes) -> Bytes:
    """An image file's bytes. Raises OSError, ValueError."""
    with files.opened(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            raise ValueError(f"the file is larger than {LARGEST:,} bytes")
        return np.fromfile(file, np.uint8)


def open_encoded(data: Bytes, channels: int, pixel_range: Range | None = None) -> Picture:
    """An image by the bytes of its file, as `open_image`."""
    if not data.size:
        raise ValueError("it is empty")
    stack = is_stack(data[:6].tobytes(), channels)
    if data[:2].tobytes() == b"\xff\xd8" and not stack:
        height, width, orientation, tags = jpeg_header(data)
        if height * width * channels > LARGEST:
            raise ValueError(f"{width} x {height} pixels are more than an image has")
        if height and width:
            size = (width, height) if orientation >= 5 else (height, width)
            return Picture(*size, partial(_jpeg, untagged(data, tags), channels, orientation))
    with without_warnings(), contextlib.suppress(UnidentifiedImageError):  # of TIFF files Pillow knows some kinds
        if not stack:
            with Image.open(io.BytesIO(data.data), formats=formats()) as opened:
                return Picture.of(upright(opened, channels, pixel_range))
    values, kind, orientation = read_stack(data, channels)
    pixels = np.ascontiguousarray(values if kind is None else as_bytes(values, kind, pixel_range))
    return Picture.of(_turned(torch.from_numpy(pixels).permute(2, 0, 1), orientation))


def _jpeg(data: Bytes, channels: int, orientation: int, factor: int) -> Tensor:
    """Upright. Each library reads what the other refuses, whatever the factor."""

    def whole() -> Tensor:
        return _turned(jpeg_pixels(torch.from_numpy(data), channels), orientation)

    if factor == 1:
        with contextlib.suppress(RuntimeError):
            return whole()
    try:
        return _turned(_smaller(data, channels, factor), orientation)
    except (OSError, SyntaxError, ValueError):
        if factor > 1:
            with contextlib.suppress(RuntimeError):
                return whole()
        raise


def _smaller(data: Bytes, channels: int, factor: int) -> Tensor:
    with without_warnings(), JpegImageFile(io.BytesIO(data.data)) as opened:  # its size was checked
        if factor > 1:
            opened.draft("RGB" if channels == 3 else "L", (opened.width // factor, opened.height // factor))
        return from_pillow(opened, channels)


def untagged(data: Bytes, tags: list[int]) -> Bytes:
    """A JPEG whose segments at these places are of a kind that no decoder reads: some would turn the image by them."""
    if tags:
        data = data.copy()
        data[[place + 1 for place in tags]] = 0xEC
    return data


def _turned(image: Tensor, orientation: int) -> Tensor:
    """An image (C, H, W) upright, by its EXIF orientation (Exif 2.32, page 36)."""
    image = image.transpose(1, 2) if orientation >= 5 else image
    flipped = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}.get(orientation, ())
    return image.flip(flipped) if flipped else image


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Without Pillow's, about odd metadata in images that are fine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@lru_cache(maxsize=1)
def formats() -> tuple[str, ...]:
    """Those of `FORMATS` that Pillow can open here."""
    Image.init()
    with contextlib.suppress(ImportError):
        import_module("pillow_heif").register_heif_opener()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def jpeg_header(data: Bytes) -> tuple[int, int, int, list[int]]:
    """Height and width in a JPEG's frame header, (0, 0) without one; its orientation, as Pillow finds it in EXIF or
    else in XMP: 1 to 8, by default 1; and where the segments of such metadata begin."""
    place, end, told, size, tags = 2, len(data) - 8, Image.Image(), (0, 0), []
    while place < end and data[place] == 0xFF:
        kind = data[place + 1]
        if kind == 0xDA:  # the pixels
            break
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            high, low, wide, narrow = data[place + 5 : place + 9].tolist()
            size = 256 * high + low, 256 * wide + narrow
        # Fill bytes have one byte and markers without a payload two; the others have a length field.
        step = 1 if kind == 0xFF else 2
        if kind != 0xFF and kind != 0x01 and not 0xD0 <= kind <= 0xD8:
            step += 256 * int(data[place + 2]) + int(data[place + 3])
        if kind == 0xE1:
            tags.append(place)
            segment = data[place + 4 : place + step].tobytes()
            if segment.startswith(b"Exif"):  # a long one continues in others
                told.info["exif"] = told.info["exif"] + segment[6:] if "exif" in told.info else segment
            elif segment.startswith(XMP):
                told.info["xmp"] = segment[len(XMP) :]
        place += step
    return *size, orientation_of(told) if told.info else 1, tags


def orientation_of(image: Image.Image) -> int:
    """Of an image that is loaded: 1 to 8; 1 where it is invalid."""
    with contextlib.suppress(Exception):  # EXIF may hold anything at all
        orientation: int = image.getexif().get(ExifTags.Base.Orientation, 1)
        return orientation if orientation in range(2, 9) else 1
    return 1


def from_pillow(image: Image.Image, channels: int, pixel_range: Range | None = None) -> Tensor:
    """A Pillow image as (channels, height, width) uint8, on white where it is transparent. Raises ValueError."""
    kind, clear = kind_of(image), image.info.get("transparency")
    if kind is not None and kind.colour and pixel_range not in (None, WHOLE):
        raise ValueError("of 16-bit colour 65,535 is white, whatever data.pixel_range says: save it with 8 bits")
    if kind is not None and not kind.colour:
        values = as_bytes(np.asarray(image), kind, pixel_range)
        if isinstance(clear, int):  # the value that is transparent
            values[np.asarray(image) == clear] = 255
        image = Image.fromarray(values)
    elif clear is not None or image.mode in ALPHA or getattr(image.palette, "mode", "").endswith("A"):
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    pixels = np.array(image.convert("RGB" if channels == 3 else "L"))
    return torch.from_numpy(pixels.reshape(image.height, image.width, channels)).permute(2, 0, 1)


def upright(image: Image.Image, channels: int, pixel_range: Range | None = None) -> Tensor:
    """As `from_pillow`, turned as its EXIF data, or else XMP's, say."""
    if channels not in (1, 3):
        raise ValueError(f"a Pillow image has 1 or 3 channels, and data.channels={channels}: give a uint8 tensor")
    return _turned(from_pillow(image, channels, pixel_range), orientation_of(image))


def with_channels(images: Tensor, channels: int) -> Tensor:
    """Images (..., C, H, W) of 1 or 3 channels with 1 (their luma) or 3 (repeated). Raises RecipeError of others."""
    if (have := images.shape[-3]) == channels:
        return images
    if {have, channels} - {1, 3}:
        raise RecipeError(f"images have {have} channels, and data.channels={channels}")
    if channels == 3:
        return images.expand(*images.shape[:-3], 3, *images.shape[-2:])
    luma: Tensor = vision.rgb_to_grayscale(images)
    return luma


def reason(error: BaseException) -> str:
    """Why something could not be read, in a few words."""
    if isinstance(error, UnidentifiedImageError):  # its text names a Python object
        return "cannot identify image file"
    text = error.strerror if isinstance(error, OSError) and error.strerror else text_of(error).partition("\n")[0]
    return text[:200] or type(error).__name__


def from_item(image: Any, channels: int, pixel_range: Range | None = None) -> Tensor:
    """The image of a user's item, a uint8 (C, H, W) tensor or Pillow image, as `PhotoSource.read` returns it."""
    if isinstance(image, Image.Image):
        return upright(image, channels, pixel_range)
    fits = isinstance(image, Tensor) and image.dim() == 3 and image.shape[0] in (1, 3, channels)
    if not fits or image.dtype != torch.uint8:
        kind = f"{image.dtype} {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
        wanted = "1 or 3" if channels in (1, 3) else channels
        raise TypeError(f"an item must be (uint8 tensor of {wanted} x H x W or Pillow image, label), found {kind}")
    return with_channels(image, channels)

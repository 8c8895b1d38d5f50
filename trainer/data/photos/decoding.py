"""Image decoding: from a file, a Pillow image or a user's item to a uint8 tensor."""

import contextlib
import io
import os
import struct
import warnings
import zlib
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor
from torchvision.transforms.v2 import functional as vision

from trainer.data.photos.jpeg import decode_jpeg
from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.pixel_range import WHOLE, Range, as_bytes, find_pixel_kind
from trainer.data.photos.stacks import LARGEST, choose_page, is_stack, read_stack
from trainer.errors import RecipeError, SetupError, load_extra, read_line
from trainer.saving import files

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Formats that Pillow may open. The suffix of a file does not matter. Other formats are excluded,
# because Pillow's readers for them start programs (Ghostscript for EPS), or are rarely used and
# maintained. HEIF needs pillow-heif.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "HEIF", "JPEG2000")
# First bytes of a JPEG file and of a PNG file.
JPEG = b"\xff\xd8"
PNG = b"\x89PNG\r\n\x1a\n"
# Markers of a JPEG: start of the pixels, end of the image.
SCAN, END = b"\xff\xda", b"\xff\xd9"
# If this number of bytes at the end of a JPEG are zeros, the end of the image may be missing:
# compressed pixels never contain so many consecutive zero bytes.
PADDING = 64
# First bytes of a JPEG's XMP segment.
XMP = b"http://ns.adobe.com/xap/1.0/\0"
# Context manager that hides Pillow's warnings about unusual metadata in readable images.
without_warnings = partial(warnings.catch_warnings, action="ignore")
# Dimensions of an image (C, H, W) to flip for each EXIF orientation (Exif 2.32, page 36). For
# orientations 5 to 8, height and width must be exchanged before the flip.
FLIPS: dict[int, tuple[int, ...]] = {
    2: (2,),
    3: (1, 2),
    4: (1,),
    6: (2,),
    7: (1, 2),
    8: (1,),
}


def open_image(
    path: str,
    channels: int,
    pixel_range: Range | None = None,
) -> Picture:
    """Open an image file. The decoded image is turned upright according to its EXIF orientation.

    The format determines the decoder:

    - `decode_jpeg` decodes JPEG files. With torchcodec, it is twice as fast as Pillow.
    - Pillow decodes JPEG files that `decode_jpeg` refuses, JPEG files that are decoded at a reduced
      size, and all other image formats.
    - `read_stack` decodes arrays, and TIFF files that Pillow refuses. If `channels` is neither 1
      nor 3, it reads all files, and refuses other formats.

    Args:
        path: the file.
        channels: the number of channels to return.
        pixel_range: the recipe's data.pixel_range.

    Raises:
        OSError, ValueError, RuntimeError: the file cannot be read. Decoding raises them too.
    """
    return open_encoded(read_file(path), channels, pixel_range)


def read_file(path: str | bytes) -> Bytes:
    """Return the bytes of an image file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is too large.
    """
    with files.open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            raise ValueError(f"the file is larger than {LARGEST:,} bytes")
        return np.fromfile(file, np.uint8)


def open_encoded(
    data: Bytes,
    channels: int,
    pixel_range: Range | None = None,
) -> Picture:
    """Open an image from the bytes of its file, as `open_image` does."""
    if not data.size:
        raise ValueError("it is empty")
    stack = is_stack(data[:6].tobytes(), channels)
    if data[:8].tobytes() == PNG:
        check_png(data)
    if data[:2].tobytes() == JPEG and not stack:
        # If missing pixels were replaced by zeros, decoders return gray pixels without an error.
        if not data[-PADDING:].any():
            raw = data.tobytes()
            if raw.rfind(SCAN) > raw.rfind(END):
                raise ValueError("it was cut, and its end consists of zeros: copy it again")
        height, width, components, orientation, tags = parse_jpeg_header(data)
        if height * width * channels > LARGEST:
            raise ValueError(f"its {width} x {height} pixels are more than {LARGEST:,} bytes")
        if height and width:
            size = (width, height) if orientation >= 5 else (height, width)
            if tags:
                # Some decoders turn the image according to these segments, and `_turn` would turn
                # it a second time. Change their type to one that no decoder reads.
                data = data.copy()
                data[[start + 1 for start in tags]] = 0xEC
            # Decoders on GPUs refuse CMYK colors.
            jpeg = torch.from_numpy(data) if orientation == 1 and components in (1, 3) else None
            return Picture(*size, partial(_decode_jpeg, data, channels, orientation), jpeg)
    # Pillow reads only some kinds of TIFF files. `read_stack` tries all files that Pillow refuses.
    with without_warnings(), contextlib.suppress(UnidentifiedImageError):
        if not stack:
            with Image.open(io.BytesIO(data.data), formats=list_formats()) as opened:
                if opened.format == "TIFF":
                    choose_page(opened)
                return Picture.of(from_pillow_upright(opened, channels, pixel_range))
    values, kind, orientation = read_stack(data, channels)
    if kind:
        values = as_bytes(values, kind, pixel_range)
    pixels = torch.from_numpy(np.ascontiguousarray(values))
    return Picture.of(_turn(pixels.permute(2, 0, 1), orientation))


def check_png(data: Bytes) -> None:
    """Compare the pixels of a PNG file with their checksums, which Pillow does not check.

    Raises:
        ValueError: a checksum differs.
    """
    raw = data.tobytes()
    start = len(PNG)
    while (kind := raw[start + 4 : start + 8]).isalpha() and kind != b"IEND":
        end = start + 8 + int.from_bytes(raw[start : start + 4])
        stored = raw[end : end + 4]
        # A file that is cut within the checksum is refused by the decoder.
        if kind == b"IDAT" and len(stored) == 4:
            checksum = zlib.crc32(raw[start + 4 : end])
            if checksum != int.from_bytes(stored):
                raise ValueError("the checksum of its pixels is wrong: the file is damaged")
        start = end + 4


def _decode_jpeg(
    data: Bytes,
    channels: int,
    orientation: int,
    factor: int,
) -> Tensor:
    """Decode a JPEG at about 1 / `factor` of its size, and turn it upright.

    With factor 1, `decode_jpeg` decodes the file, or Pillow if `decode_jpeg` refuses it. With
    another factor, Pillow decodes the file at the reduced size. If Pillow refuses it, `decode_jpeg`
    decodes it at full size.
    """

    def decode_whole() -> Tensor:
        return _turn(decode_jpeg(torch.from_numpy(data), channels), orientation)

    if factor == 1:
        with contextlib.suppress(RuntimeError):
            return decode_whole()
    try:
        # Use JpegImageFile, because Image.open would apply Pillow's own limit of the image size.
        # `open_encoded` has already checked the size.
        with without_warnings(), JpegImageFile(io.BytesIO(data.data)) as opened:
            if factor > 1:
                mode = "RGB" if channels == 3 else "L"
                opened.draft(mode, (opened.width // factor, opened.height // factor))
            return _turn(from_pillow(opened, channels), orientation)
    except (OSError, SyntaxError, ValueError):
        if factor > 1:
            with contextlib.suppress(RuntimeError):
                return decode_whole()
        raise


def _turn(image: Tensor, orientation: int) -> Tensor:
    """Turn an image (C, H, W) upright according to its EXIF orientation."""
    if orientation >= 5:
        image = image.transpose(1, 2)
    dimensions = FLIPS.get(orientation)
    return image.flip(dimensions) if dimensions else image


@cache
def register_heif() -> str:
    """Let Pillow open HEIC photos. Return an error message, or an empty string on success."""
    try:
        load_extra("HEIC", "pillow_heif").register_heif_opener()
    except SetupError as error:
        return str(error)
    return ""


@cache
def list_formats() -> tuple[str, ...]:
    """Return the members of `FORMATS` that the installed Pillow can open."""
    Image.init()
    register_heif()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def parse_jpeg_header(data: Bytes) -> tuple[int, int, int, int, list[int]]:
    """Read the segments of a JPEG up to its pixels.

    Returns:
        (height, width, components, orientation, tags): the first three are those in the frame
        header, or 0 if there is no such header. The orientation is a number from 1 to 8 in the EXIF
        data, or else in the XMP data, or else 1. `tags` are the offsets of the segments that may
        contain EXIF or XMP data.
    """
    start = 2
    end = len(data) - 8
    # Collect EXIF and XMP data in an empty image, because Pillow reads the orientation from the
    # `info` of an image.
    metadata = Image.Image()
    frame = (0, 0, 0)
    tags = []
    while start < end and data[start] == 0xFF:
        kind = data[start + 1]
        # The compressed pixels begin at this segment.
        if kind == 0xDA:
            break
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            frame = struct.unpack(">HHB", data[start + 5 : start + 10].data)
        # A fill byte is one byte long, and a marker without payload two bytes. All other segments
        # contain their length.
        step = 1 if kind == 0xFF else 2
        if kind != 0xFF and kind != 0x01 and not 0xD0 <= kind <= 0xD8:
            step += int.from_bytes(data[start + 2 : start + 4])
        if kind == 0xE1:
            tags.append(start)
            segment = data[start + 4 : start + step].tobytes()
            # Long EXIF data are divided among several segments, so join them.
            if segment.startswith(b"Exif"):
                joined = metadata.info.get("exif", segment[:6])
                metadata.info["exif"] = joined + segment[6:]
            elif segment.startswith(XMP):
                metadata.info["xmp"] = segment[len(XMP) :]
        start += step
    orientation = read_orientation(metadata) if metadata.info else 1
    return *frame, orientation, tags


def read_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of a loaded image, 1 to 8; 1 if it is invalid or missing."""
    # Pillow can raise any exception for invalid EXIF data.
    with contextlib.suppress(Exception):
        orientation: int = image.getexif().get(ExifTags.Base.Orientation, 1)
        return orientation if orientation in range(2, 9) else 1
    return 1


def from_pillow(
    image: Image.Image,
    channels: int,
    pixel_range: Range | None = None,
) -> Tensor:
    """Convert a Pillow image to (channels, height, width) uint8. Transparent pixels become white.

    Raises:
        ValueError: the pixels cannot be converted to bytes.
    """
    kind = find_pixel_kind(image)
    if kind is not None and kind.colour and pixel_range not in (None, WHOLE):
        raise ValueError(
            "in 16-bit colour 65,535 is white, whatever data.pixel_range says: save it with 8 bits"
        )
    if kind is not None and not kind.colour:
        values = as_bytes(np.asarray(image), kind, pixel_range)
        # In a gray image, one pixel value can mean transparent.
        transparent = image.info.get("transparency")
        if isinstance(transparent, int):
            values[np.asarray(image) == transparent] = 255
        image = Image.fromarray(values)
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    pixels = np.array(image.convert("RGB" if channels == 3 else "L"))
    pixels = pixels.reshape(image.height, image.width, channels)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def from_pillow_upright(
    image: Image.Image,
    channels: int,
    pixel_range: Range | None,
) -> Tensor:
    """Convert like `from_pillow`, and turn the image upright according to its metadata.

    The orientation is read from the EXIF data, or else from the XMP data.
    """
    if channels not in (1, 3):
        raise ValueError(
            f"a Pillow image has 1 or 3 channels, not data.channels={channels}: return a uint8 "
            "tensor instead"
        )
    return _turn(from_pillow(image, channels, pixel_range), read_orientation(image))


def convert_channels(images: Tensor, channels: int) -> Tensor:
    """Convert images (..., C, H, W) to `channels` channels.

    3 channels become their luma. One channel is repeated 3 times.

    Raises:
        RecipeError: the conversion is not one between 1 and 3 channels.
    """
    actual = images.shape[-3]
    if actual == channels:
        return images
    if {actual, channels} - {1, 3}:
        raise RecipeError(f"images have {actual} channels, not data.channels={channels}")
    if channels == 3:
        return images.expand(*images.shape[:-3], 3, *images.shape[-2:])
    return vision.rgb_to_grayscale(images)  # type: ignore[no-any-return]


def describe_failure(error: BaseException) -> str:
    """Return a phrase for messages that says why a file or item could not be read."""
    # Replace the message of this error, which contains the address of a Python object.
    if isinstance(error, UnidentifiedImageError):
        return "cannot identify image file"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return read_line(error) or type(error).__name__


def decode_item(
    image: Any,
    channels: int,
    pixel_range: Range | None = None,
) -> Tensor:
    """Convert the image of a user's item to (channels, height, width) uint8.

    Args:
        image: a uint8 tensor (C, H, W) or a Pillow image.
        channels: the number of channels to return.
        pixel_range: the recipe's data.pixel_range.

    Raises:
        TypeError: the image has another type, or another number of channels.
    """
    if isinstance(image, Image.Image):
        return from_pillow_upright(image, channels, pixel_range)
    is_image = isinstance(image, Tensor) and image.dim() == 3
    has_channels = is_image and image.shape[0] in (1, 3, channels)
    if not has_channels or image.dtype != torch.uint8:
        if isinstance(image, Tensor):
            kind = f"{image.dtype} {tuple(image.shape)}"
        else:
            kind = type(image).__name__
        allowed = "1 or 3" if channels in (1, 3) else channels
        raise TypeError(
            f"an item must be (uint8 tensor of {allowed} x H x W or Pillow image, label), but it "
            f"is {kind}"
        )
    return convert_channels(image, channels)

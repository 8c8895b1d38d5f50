"""JPEG decoding by torchcodec, or by torchvision if torchcodec cannot be loaded.

Both use libjpeg and return the same pixels. torchvision's decoder has been deprecated since 0.29.
torchcodec is imported when the first JPEG is decoded, and needs no FFmpeg for images. Since 0.16,
it works with all versions of torch from 2.11 on that are built for the same CUDA version.
"""

import io
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision import io as torchvision_io
from torchvision.transforms.v2 import functional as vision

from trainer.errors import read_text


class Codec(NamedTuple):
    """A JPEG decoder.

    Attributes:
        name: name of the library.
        decode: function (data, channels) that decodes the bytes of a JPEG. Some decoders turn the
            image according to the EXIF orientation in its first APP1 segment.
        instead: reason why torchcodec is not used; empty if it is used.
    """

    name: str
    decode: Callable[[Tensor, int], Tensor]
    instead: str = ""


def decode_jpeg(data: Tensor, channels: int) -> Tensor:
    """Decode a JPEG's bytes, (n,) uint8, to (channels, height, width) uint8.

    Raises:
        RuntimeError: the decoder cannot read the bytes, or no decoder except Pillow is installed.
    """
    return get_codec().decode(data, channels)


def encode_jpeg(image: Tensor, quality: int) -> Tensor:
    """Encode an image, (1 or 3, H, W) uint8, as a JPEG's bytes, (n,) uint8."""
    file = io.BytesIO()
    vision.to_pil_image(image).save(file, "JPEG", quality=quality)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


@cache
def get_codec() -> Codec:
    """Return torchcodec's decoder if it can be loaded, or else a fallback."""
    try:
        decode = import_module("torchcodec.decoders").decode_jpeg
    except (ModuleNotFoundError, AttributeError):
        why = "0.16 or newer is not installed: pip install --upgrade torchcodec"
    except Exception as error:
        # If torchcodec is built for another CUDA version, it can raise any exception.
        reason = read_text(error.__cause__ or error).partition("\n")[0]
        why = f"it cannot be loaded ({reason}): install the one of the index that torch came from"
    else:
        return Codec(
            "torchcodec",
            lambda data, channels: decode(data, mode="RGB" if channels == 3 else "GRAY"),
        )
    name = "torchvision" if hasattr(torchvision_io, "decode_jpeg") else "Pillow"
    return Codec(name, _decode_with_torchvision, why)


def _decode_with_torchvision(data: Tensor, channels: int) -> Tensor:
    if not hasattr(torchvision_io, "decode_jpeg"):
        # The caller catches this error and tries Pillow.
        raise RuntimeError("no JPEG decoder except Pillow is installed")
    mode = torchvision_io.ImageReadMode.GRAY
    if channels == 3:
        mode = torchvision_io.ImageReadMode.RGB
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return torchvision_io.decode_jpeg(data, mode=mode)  # type: ignore[no-any-return]

"""JPEG's decoder: torchcodec's, or torchvision's where torchcodec cannot be loaded. Both are libjpeg with the same
pixels.

torchvision's is deprecated since 0.29. torchcodec is loaded for the first JPEG, and needs no FFmpeg for it. Since 0.16
it reads images, with every torch since 2.11 that is built for the same CUDA.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import io as torchvision_io

from trainer.errors import text_of


class Codec(NamedTuple):
    """Whose function is used."""

    name: str
    decode: Callable[[Tensor, int], Tensor]  # bytes and channels; some turn as the first APP1 segment says
    instead: str = ""  # why it is not torchcodec's


def jpeg_pixels(data: Tensor, channels: int) -> Tensor:
    """A JPEG's bytes, (n,) uint8, as (channels, height, width) uint8. Raises RuntimeError."""
    return codec().decode(data, channels)


def jpeg_bytes(image: Tensor, quality: int) -> Tensor:
    """An image (1 or 3, H, W) uint8 as a JPEG's bytes, (n,) uint8."""
    pixels, file = np.ascontiguousarray(image.permute(1, 2, 0).numpy()), io.BytesIO()
    Image.fromarray(pixels[..., 0] if len(image) == 1 else pixels).save(file, "JPEG", quality=quality)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


@lru_cache(maxsize=1)
def codec() -> Codec:
    """The one that this process uses."""
    try:
        decode = import_module("torchcodec.decoders").decode_jpeg
    except (ModuleNotFoundError, AttributeError):
        return _without("0.16 or newer is not installed: pip install --upgrade torchcodec")
    except Exception as error:  # built for another CUDA, it raises anything at all
        why = text_of(error.__cause__ or error).partition("\n")[0]
        return _without(f"it cannot be loaded ({why}): install the one of the index that torch came from")
    return Codec("torchcodec", lambda data, channels: decode(data, mode="RGB" if channels == 3 else "GRAY"))


def _without(why: str) -> Codec:
    return Codec("torchvision" if hasattr(torchvision_io, "decode_jpeg") else "Pillow", _torchvision_decode, why)


def _torchvision_decode(data: Tensor, channels: int) -> Tensor:
    if not hasattr(torchvision_io, "decode_jpeg"):
        raise RuntimeError("only Pillow can read it here")  # which it then does
    mode = torchvision_io.ImageReadMode.RGB if channels == 3 else torchvision_io.ImageReadMode.GRAY
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        image: Tensor = torchvision_io.decode_jpeg(data, mode=mode)
    return image

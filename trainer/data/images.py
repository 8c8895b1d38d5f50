"""Decoding: from a file, a Pillow image or a user's item to a uint8 tensor."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import functional as vision


def read_image(path: str, channels: int) -> Tensor:
    """Decode a file to (channels, height, width) uint8.

    JPEG goes through torchvision, which is twice as fast; what it does not take, and every other kind, through Pillow.
    """
    data = np.fromfile(path, np.uint8)
    if not data.size:
        raise ValueError("the file is empty")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd metadata in images that are fine, and torchvision's about itself
        if data[:2].tobytes() == b"\xff\xd8":
            with contextlib.suppress(RuntimeError):
                mode = ImageReadMode.RGB if channels == 3 else ImageReadMode.GRAY
                image: Tensor = decode_jpeg(torch.from_numpy(data), mode=mode)
                return image
        with Image.open(path) as opened:
            return from_pillow(opened, channels)


def from_pillow(image: Image.Image, channels: int) -> Tensor:
    """A Pillow image of any mode as (channels, height, width) uint8; 16 bits become 8, transparency is dropped."""
    if image.mode.startswith("I"):  # 16 bits, in a 32-bit container where the mode is plain "I"
        values = np.asarray(image)
        deep = image.mode != "I" or values.max(initial=0) > 255
        image = Image.fromarray(np.clip(values >> 8 if deep else values, 0, 255).astype(np.uint8))
    elif image.mode == "F":
        image = Image.fromarray(np.clip(np.nan_to_num(np.asarray(image)), 0, 255).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    pixels = np.array(image.convert("RGB" if channels == 3 else "L"))
    return torch.from_numpy(pixels.reshape(image.height, image.width, channels)).permute(2, 0, 1)


def with_channels(images: Tensor, channels: int) -> Tensor:
    """Images (..., C, H, W) of 1 or 3 channels with 1 (their luma) or 3 (repeated)."""
    if images.shape[-3] == channels:
        return images
    if channels == 3:
        return images.expand(*images.shape[:-3], 3, *images.shape[-2:])
    luma: Tensor = vision.rgb_to_grayscale(images)
    return luma


def reason(error: BaseException) -> str:
    """Why something could not be read, in a few words."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
    return text[:200] or type(error).__name__


def from_item(item: Any, channels: int) -> tuple[Tensor, int]:
    """A user's data set item, (uint8 (C, H, W) tensor or Pillow image, label), as `PhotoSource.read` gives it."""
    image, label = item
    if isinstance(image, Image.Image):
        return from_pillow(image, channels), int(label)
    if not isinstance(image, Tensor) or image.dtype != torch.uint8 or image.dim() != 3 or image.shape[0] not in (1, 3):
        found = f"{image.dtype} {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
        raise TypeError(f"an item must be (uint8 tensor of 1 or 3 x H x W or Pillow image, label), found {found}")
    return with_channels(image, channels), int(label)

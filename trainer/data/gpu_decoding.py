"""Decoding of JPEG photos on a GPU, for data.decode=gpu.

A loader worker then puts the bytes of a JPEG into a batch, in the place of its pixels. The GPU
decodes the photos of a batch as a list. They are cropped, resized and augmented there by the same
functions, and with the same random draws, as in a worker.

The pixels differ from those of a worker, because the decoders differ, because a GPU resizes in
float and not in bytes, and because a worker decodes large photos at a reduced size (`lazy_images`).
"""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from trainer.data.folders.photo_folders import unreadable
from trainer.data.photos.decoding import describe_failure, open_encoded
from trainer.data.photos.jpeg import encode_jpeg
from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.photo_reader import Key, Reader, Report, private_draws
from trainer.errors import RecipeError

# Function (data, channels) that decodes a list of JPEGs to images (C, H, W) uint8 on the device.
Decode = Callable[[list[Tensor], int], list[Tensor]]


def load_decoder(device: torch.device) -> Decode:
    """Return a function that decodes JPEGs on the device.

    Raises:
        RecipeError: the device cannot decode JPEGs.
    """

    def decode(data: list[Tensor], channels: int) -> list[Tensor]:
        decoders = import_module("torchcodec.decoders")
        mode = "RGB" if channels == 3 else "GRAY"
        images: list[Tensor] = decoders.decode_jpeg(data, mode=mode, device=device)
        return images

    reason = "the device is a CPU"
    if device.type == "cuda":
        try:
            decode([encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8), quality=90)], 3)
            return decode
        except Exception as error:
            # torchcodec may be missing, or lack nvJPEG, and raises errors of many types.
            reason = str(error).partition("\n")[0]
    raise RecipeError(f"data.decode=gpu is not possible here ({reason}): use data.decode=cpu")


class PhotoDecoder:
    """Decodes and prepares the photos that a `Reader` has left encoded."""

    def __init__(self, device: torch.device, reader: Reader) -> None:
        """Prepare to decode what a reader with the same arguments delivers.

        Raises:
            RecipeError: the device cannot decode JPEGs.
        """
        self._device = device
        self._reader = reader
        self._decode = load_decoder(device)

    def fill(self, images: Tensor, slot: Tensor, report: Report, key: Key) -> None:
        """Replace the encoded rows of a batch by their pixels.

        Args:
            images: the batch, (rows, H, W, C) uint8 on the device.
            slot: the batch on the CPU.
            report: the report about the batch.
            key: epoch and samples of the batch.

        Raises:
            SetupError: no decoder can read a photo.
        """
        if not report.encoded:
            return
        _, epoch, index = key
        memory = slot.flatten(1)
        # Copies, because on a CPU the pixels replace the bytes.
        data = [memory[row, :length].clone() for row, length in report.encoded]
        prepare = self._reader.build_preparation(epoch, index)
        try:
            photos = self._decode(data, self._reader.channels)
        except Exception:
            # The decoder refuses some photo, such as one with CMYK colors. Its errors have many
            # types, and do not name the photo.
            names = [self._reader.where(index[row]) for row, _ in report.encoded]
            photos = [*map(self._decode_single, data, names)]
        with private_draws():
            for (row, _), photo in zip(report.encoded, photos, strict=True):
                images[row] = prepare(row, Picture.of(photo)).permute(1, 2, 0)
        # Padding repeats the last sample.
        images[report.rows :] = images[report.rows - 1]

    def _decode_single(self, data: Tensor, name: str) -> Tensor:
        """Decode a photo on the device, or on the CPU if the device refuses it."""
        channels = self._reader.channels
        try:
            return self._decode([data], channels)[0]
        except Exception:
            pass
        try:
            return open_encoded(data.numpy(), channels).decode(1).to(self._device)
        except Exception as error:
            raise unreadable([(name, describe_failure(error))], 1) from error

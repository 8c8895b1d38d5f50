"""Decoding of JPEG photos on a GPU, for data.decode=gpu.

A loader worker then puts the bytes of a JPEG into a batch, in the place of its pixels. The GPU
decodes the photos of a batch as a list. They are cropped, resized and augmented there by the same
functions, and with the same random draws, as in a worker.

The pixels differ from those of a worker, because the decoders differ, because a GPU resizes in
float and not in bytes, and because a worker decodes large photos at a reduced size (`lazy_images`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import islice

import torch
from torch import Tensor

from trainer.data.photos.decoding import describe_failure, open_encoded
from trainer.data.photos.jpeg import encode_jpeg
from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.photo_reader import Key, PhotoPreparation, Report, private_draws
from trainer.data.sets import PhotoSource
from trainer.errors import RecipeError, SetupError, is_out_of_memory
from trainer.recipe import Recipe

# Maximum number of photos that are decoded together, so that few are in memory in full size.
TOGETHER = 32
# Function that decodes a list of JPEGs to images (C, H, W) uint8 on the device.
Decode = Callable[[list[Tensor]], list[Tensor]]


def load_decoder(device: torch.device, channels: int) -> Decode:
    """Return a function that decodes JPEGs to 1 or 3 channels on the device.

    Raises:
        RecipeError: the device cannot decode JPEGs.
    """

    def decode(data: list[Tensor]) -> list[Tensor]:
        decoders = import_module("torchcodec.decoders")
        mode = "RGB" if channels == 3 else "GRAY"
        images: list[Tensor] = decoders.decode_jpeg(data, mode=mode, device=device)
        return images

    reason = "the device is a CPU"
    if device.type == "cuda":
        try:
            decode([encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8), quality=90)])
            return decode
        except Exception as error:
            # torchcodec may be missing, or lack nvJPEG, and raises errors of many types.
            reason = str(error).partition("\n")[0]
    raise RecipeError(f"data.decode=gpu is not possible here ({reason}): use data.decode=cpu")


def is_of_device(error: Exception) -> bool:
    """Return whether an error is no fault of a photo."""
    return is_out_of_memory(error) or isinstance(error, torch.AcceleratorError)


class JpegDecoder:
    """Decodes JPEGs on a device, and those that the device refuses on the CPU."""

    def __init__(self, device: torch.device, channels: int) -> None:
        """Prepare to decode JPEGs to 1 or 3 channels.

        Raises:
            RecipeError: the device cannot decode JPEGs.
        """
        self._device = device
        self._channels = channels
        self._decode = load_decoder(device, channels)

    def open(self, data: Iterable[Tensor]) -> Iterator[Picture]:
        """Yield the photos of JPEGs, each (n,) uint8 on the CPU. Their pixels are on the device.

        Lists of `TOGETHER` JPEGs are taken from `data` and decoded when they are needed.
        """
        remaining = iter(data)
        while together := [*islice(remaining, TOGETHER)]:
            yield from self._open(together)

    def _open(self, data: list[Tensor]) -> list[Picture]:
        """Decode photos on the device. Those that it refuses will be decoded on the CPU."""
        try:
            return [*map(Picture.of, self._decode(data))]
        except Exception as error:
            # The errors of decoders have many types, and do not name the photo.
            if is_of_device(error):
                raise
        if len(data) > 1:
            half = len(data) // 2
            return self._open(data[:half]) + self._open(data[half:])
        picture = open_encoded(data[0].numpy(), self._channels)
        return [replace(picture, decode=lambda factor: picture.decode(factor).to(self._device))]


class PhotoDecoder:
    """Decodes and prepares the photos of a source that a `Reader` has left encoded."""

    def __init__(
        self, device: torch.device, source: PhotoSource, recipe: Recipe, shape: Sequence[int]
    ) -> None:
        """Prepare to decode to images of `shape` (H, W, C).

        Raises:
            RecipeError: the device cannot decode JPEGs.
        """
        height, width, channels = shape
        self._source = source
        self._preparation = PhotoPreparation(recipe, (height, width))
        self._decoder = JpegDecoder(device, channels)
        self._has_decoded = False

    def fill(self, images: Tensor, slot: Tensor, report: Report, key: Key) -> None:
        """Replace the encoded rows of a batch by their pixels.

        Args:
            images: the batch, (rows, H, W, C) uint8 on the device.
            slot: the batch on the CPU.
            report: the report about the batch.
            key: epoch and samples of the batch.

        Raises:
            RecipeError: the first training batch contains no encoded photo.
            SetupError: no decoder can read a photo, or it cannot be prepared.
        """
        _, epoch, index = key
        memory = slot.flatten(1)
        if not report.encoded:
            if report.rows and epoch is not None and not self._has_decoded:
                raise RecipeError(
                    f"data.decode=gpu decodes none of the first {report.rows} photos: they are "
                    f"larger than {memory.shape[1]:,} bytes, turned, or no JPEGs of RGB or gray "
                    "pixels; use data.decode=cpu"
                )
            return
        self._has_decoded = True
        prepare = self._preparation.build(epoch, index)
        # Copies, because on a CPU the pixels replace the bytes.
        data = (memory[row, :length].clone() for row, length in report.encoded)
        pictures = self._decoder.open(data)
        for (row, _), picture in zip(report.encoded, pictures, strict=True):
            try:
                with private_draws():
                    images[row] = prepare(row, picture).permute(1, 2, 0)
            except Exception as error:
                if is_of_device(error):
                    raise
                source = self._source
                raise SetupError(
                    f"{source.where(index[row] % len(source))} cannot be read "
                    f"({describe_failure(error)}): remove it, or use data.decode=cpu"
                ) from error
        # Padding repeats the last sample.
        images[report.rows :] = images[report.rows - 1]

"""Decoding of JPEG photos on a GPU, for data.decode=gpu.

Loader workers read the files and draw the crops, as for decoding on the CPU. The encoded bytes of a
photo take the place of its pixels in the batch. The GPU decodes the photos of a batch as a list,
and crops and resizes them by matrix products.

The pixels differ from those of the CPU by rounding, and because the CPU decodes large photos at a
reduced size (`lazy_images`). The decoders also differ in how they enlarge the colors of a JPEG.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.data.photos.copies import copy_to_device
from trainer.data.photos.decoding import open_encoded
from trainer.data.photos.jpeg import encode_jpeg
from trainer.data.sampling import Box
from trainer.errors import RecipeError

# Maximum number of values of the decoded photos that are resized together, unless one has more.
LARGEST_GROUP = 2**26
# Function (data, channels) that decodes a list of JPEGs to images (C, H, W) uint8 on the device.
Decode = Callable[[list[Tensor], int], list[Tensor]]


class Crop(NamedTuple):
    """The part of a photo that becomes an image of the model's size.

    Attributes:
        box: top, left, height and width of the part, in pixels of the photo.
        size: height and width to which the part is resized.
        offset: top and left of the image in the resized part, which contains the whole image.
        flips: whether the image is turned upside down, and whether it is mirrored.
    """

    box: Box
    size: tuple[int, int]
    offset: tuple[int, int] = (0, 0)
    flips: tuple[bool, bool] = (False, False)


class EncodedPhoto(NamedTuple):
    """A photo that a GPU will decode.

    Attributes:
        data: the bytes of an upright JPEG, (n,) uint8, on the CPU.
        crop: the part to use.
        name: name of the photo, for messages.
    """

    data: Tensor
    crop: Crop
    name: str


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
    """Decodes and crops the encoded photos of a batch on a device."""

    def __init__(self, device: torch.device, channels: int) -> None:
        """Prepare to decode photos to 1 or 3 channels.

        Raises:
            RecipeError: the device cannot decode JPEGs.
        """
        self._device = device
        self._channels = channels
        self._decode = load_decoder(device)

    def fill(self, images: Tensor, photos: Sequence[tuple[int, EncodedPhoto]]) -> None:
        """Decode photos into rows of a batch.

        Args:
            images: (n, H, W, C) uint8 on the device.
            photos: rows, and the photos to write there.

        Raises:
            UnreadablePhoto: no decoder can read a photo.
        """
        for group in group_by_size(photos):
            decoded = self._decode_all([photo for _, photo in group])
            crops = [photo.crop for _, photo in group]
            pixels = render(decoded, crops, images.shape[1], images.shape[2])
            rows = torch.tensor([row for row, _ in group])
            images.index_copy_(0, copy_to_device(rows, self._device), pixels)

    def _decode_all(self, photos: Sequence[EncodedPhoto]) -> list[Tensor]:
        try:
            return self._decode([photo.data for photo in photos], self._channels)
        except Exception:
            # The decoder refuses some photo, such as one with CMYK colors. Its errors have many
            # types, and do not name the photo.
            return [self._decode_single(photo) for photo in photos]

    def _decode_single(self, photo: EncodedPhoto) -> Tensor:
        """Decode a photo on the device, or on the CPU if the device refuses it."""
        try:
            return self._decode([photo.data], self._channels)[0]
        except Exception:
            pass
        try:
            return open_encoded(photo.data.numpy(), self._channels).decode(1).to(self._device)
        except Exception as error:
            raise UnreadablePhoto(photo.name, error) from error


class UnreadablePhoto(Exception):
    """Raised if no decoder can read a photo. The arguments are its name and the error."""


def group_by_size(
    photos: Sequence[tuple[int, EncodedPhoto]],
) -> Iterator[Sequence[tuple[int, EncodedPhoto]]]:
    """Divide photos into groups of similar sizes, to be resized together."""
    photos = sorted(photos, key=lambda pair: pair[1].crop.box[2:])
    start = 0
    width = 0
    for stop, (_, photo) in enumerate(photos, 1):
        _, _, rows, columns = photo.crop.box
        width = max(width, columns)
        # Boxes are in ascending order of their heights.
        if 3 * (stop - start) * rows * width > LARGEST_GROUP and stop - 1 > start:
            yield photos[start : stop - 1]
            start = stop - 1
            width = columns
    if photos:
        yield photos[start:]


def render(photos: Sequence[Tensor], crops: Sequence[Crop], height: int, width: int) -> Tensor:
    """Crop and resize decoded photos, with antialiasing.

    The result equals that of `torch.nn.functional.interpolate(..., mode="bilinear",
    antialias=True)` in float, rounded.

    Args:
        photos: n images (C, ?, ?) uint8.
        crops: the part of each photo.
        height: height of the results in pixels.
        width: width of the results in pixels.

    Returns:
        (n, height, width, C) uint8.
    """
    boxes = []
    for photo, crop in zip(photos, crops, strict=True):
        top, left, rows, columns = crop.box
        box = photo[:, top : top + rows, left : left + columns]
        assert box.shape[1:] == (rows, columns), "the decoded photo has another size"
        boxes.append(box)
    tallest = max(box.shape[1] for box in boxes)
    widest = max(box.shape[2] for box in boxes)
    padded = boxes[0].new_zeros(len(boxes), boxes[0].shape[0], tallest, widest)
    for target, box in zip(padded, boxes, strict=True):
        target[:, : box.shape[1], : box.shape[2]] = box
    vertical = compute_weights(crops, 0, height, tallest, padded.device)
    horizontal = compute_weights(crops, 1, width, widest, padded.device)
    lines = torch.einsum("nyh,nchw->ncyw", vertical, padded.float())
    images = torch.einsum("ncyw,nxw->nyxc", lines, horizontal)
    return images.round_().clamp_(0, 255).to(torch.uint8)


def compute_weights(
    crops: Sequence[Crop],
    axis: int,
    length: int,
    longest: int,
    device: torch.device,
) -> Tensor:
    """Compute the weight of each pixel of a box for each pixel of an image, along one axis.

    Args:
        crops: n crops.
        axis: 0 for height, 1 for width.
        length: pixels of the image.
        longest: pixels of the largest box.
        device: device of the result.

    Returns:
        (n, length, longest) float32. The weights of pixels outside of a box are 0.
    """
    numbers = [
        (crop.box[2 + axis], crop.size[axis], crop.offset[axis], crop.flips[axis]) for crop in crops
    ]
    columns = copy_to_device(torch.tensor(numbers, dtype=torch.float32), device)[..., None]
    old, new, offset, flip = columns.unbind(1)
    pixel = torch.arange(length, device=device)
    pixel = torch.where(flip > 0, length - 1 - pixel, pixel) + offset
    scale = old / new
    # If the box becomes smaller, the triangle of the bilinear filter is as wide as two new pixels.
    center = ((pixel + 0.5) * scale)[..., None]
    support = scale.clamp(min=1)[..., None]
    source = torch.arange(longest, device=device)
    weights = (1 - (source + 0.5 - center).abs() / support).clamp_(min=0)
    weights *= source < old[..., None]
    return weights / weights.sum(-1, keepdim=True)

"""Photos as the cache stores them, and a folder of photos that reads from it."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy.typing as npt
import torch
from torch import Tensor
from torchvision.io import encode_jpeg

from trainer.data.cache import cache_blocks
from trainer.data.cache.cache_blocks import DamagedError, Prepared
from trainer.data.cache.packing import Format, Packing
from trainer.data.encoded import EncodedPhotos, open_address
from trainer.data.photos.decoding import jpeg_pixels, without_warnings
from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.photo_reader import resized

QUALITY = 90  # of the JPEGs


def prepared(address: bytes, how: Format) -> Prepared:
    """A photo as it is stored: resized to a shorter side of `how.size` pixels, unless it is smaller.

    Raises whatever reading it raises.
    """
    picture = open_address(address, how.channels, how.pixel_range)
    image = picture.whole(how.size)
    if min(image.shape[-2:]) > how.size:
        image = resized(image, [how.size])
    rows, columns = image.shape[-2:]
    if how.layout == "jpeg":
        with without_warnings():
            data = encode_jpeg(image.contiguous(), QUALITY)
    else:
        data = image.permute(1, 2, 0).contiguous().flatten()
    return Prepared(picture.height, picture.width, rows, columns, data.numpy())


def picture_of(stored: Prepared, how: Format) -> Picture:
    """A stored photo as a picture of its original size."""
    return Picture(stored.height, stored.width, partial(_decoded, stored, how))


def _decoded(stored: Prepared, how: Format, factor: int) -> Tensor:
    data = torch.from_numpy(stored.data)
    if how.layout == "jpeg":
        return jpeg_pixels(data, how.channels)
    return data.view(stored.rows, stored.columns, how.channels).permute(2, 0, 1)


class CachedFolder(EncodedPhotos):
    """The photos of a folder or of shards, in the cache.

    What the cache lacks, or holds damaged, is prepared from the photo: the same pixels, but slower.

    Attributes:
        uncached: how often that happened in this process.
    """

    def __init__(
        self,
        folder: EncodedPhotos,
        how: Format,
        part: int = 0,
        home: Path | None = None,
        packing: Packing | None = None,
    ) -> None:
        """`part` is the folder's index in `packing`; without a packing every photo is prepared anew."""
        self.__dict__.update(vars(folder))
        self.folder = folder
        self.how, self.home = how, str(home)
        self.uncached = 0
        self._keys = packing.keys if packing else None
        self._rows = packing.places[part] if packing else None

    def address(self, index: int) -> bytes:
        return self.folder.address(index)

    def part(self, rows: npt.NDArray[Any]) -> Self:
        part = super().part(rows)
        part.folder = self.folder.part(rows)
        part._rows = None if self._rows is None else self._rows[rows]
        return part

    def open(self, index: int, channels: int) -> tuple[Picture, Tensor]:
        stored = self._stored(index)
        if stored is None:
            stored = prepared(self.address(index), self.how)
            self.uncached += self._keys is not None
        return picture_of(stored, self.how), torch.as_tensor(self.labels[index])

    def _stored(self, index: int) -> Prepared | None:
        if self._keys is None or self._rows is None:
            return None
        block, row = self._rows[index].tolist()
        key = self._keys[block].tobytes()
        path = block_path(self.home, key)
        try:
            return cache_blocks.read(path, key, row)
        except DamagedError:
            with suppress(OSError):
                os.unlink(path)  # the next run builds it again
        except OSError:
            pass
        return None


def block_path(home: str, key: bytes) -> str:
    return os.path.join(home, key.hex() + cache_blocks.SUFFIX)

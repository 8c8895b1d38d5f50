"""Photos as the cache stores them, which is in which block, and a folder of photos that reads from it.

A block's name is a hash of all that its pixels depend on: the photos' paths, sizes and times, and the format. So a
block that exists is right, and one whose photos have changed has another name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from trainer.data.cache import cache_blocks
from trainer.data.cache.cache_blocks import DamagedError, Prepared
from trainer.data.encoded import EncodedPhotos, encoded, identity
from trainer.data.photos.decoding import open_encoded
from trainer.data.photos.jpeg import jpeg_bytes, jpeg_pixels
from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.photo_reader import PhotoDraws, covering, private_draws, resized, shorter_side
from trainer.data.photos.pixel_range import Range
from trainer.recipe import Recipe
from trainer.recipe.image_sizes import ImageSize, typed_size
from trainer.telemetry.verdict import Reading

TOGETHER = 256  # photos of a block, on average
MOST = 4 * TOGETHER
KEY = 16  # bytes
PHOTOS, SECONDS = 32, 1.0  # that are measured, and seconds after which fewer do
QUALITY = 90  # of the JPEGs


@dataclass(frozen=True)
class Format:
    """How photos are stored."""

    layout: str  # "raw" pixels, or "jpeg"
    size: ImageSize  # what a photo covers, of a square its shorter side; one that is smaller stays as it is
    channels: int  # 1 or 3
    pixel_range: Range | None = None  # the recipe's data.pixel_range

    VERSION = 3  # counts up when the pixels of the same photo change

    def __str__(self) -> str:
        return f"{self.VERSION}-{self.layout}-{self.size}-{self.channels}-{self.pixel_range}"


@dataclass(frozen=True)
class Packing:
    """Where the photos of some folders are in the cache."""

    keys: npt.NDArray[np.uint8]  # (blocks, KEY) uint8, their names
    paths: Sequence[Sequence[bytes]]  # of each block, the addresses of its photos
    places: Sequence[npt.NDArray[np.int32]]  # of each folder, (photos, 2) int32: block, and row in it


def pack(folders: Sequence[EncodedPhotos], how: Format) -> Packing:
    """Divide the photos of all folders together into blocks.

    The hash of a photo's path decides whether a block ends there (content-defined chunking: Muthitacharoen, Chen and
    Mazieres 2001, page 4): one photo more or less changes only its block.
    """
    paths = [[folder.address(index) for index in range(len(folder))] for folder in folders]
    blocks: list[list[bytes]] = [[]]
    for path in sorted(set().union(*paths)):
        blocks[-1].append(path)
        if len(blocks[-1]) >= MOST or not xxhash.xxh3_64_intdigest(path) % TOGETHER:
            blocks.append([])
    if not blocks[-1]:
        blocks.pop()
    place_of = {path: (block, row) for block, names in enumerate(blocks) for row, path in enumerate(names)}
    places = [np.array([place_of[path] for path in part], np.int32).reshape(-1, 2) for part in paths]
    keys = np.frombuffer(b"".join(key_of(names, how) for names in blocks), np.uint8).reshape(-1, KEY)
    return Packing(keys, blocks, places)


def key_of(paths: Sequence[bytes], how: Format) -> bytes:
    """The name of a block of the photos at these addresses, as they are now."""
    whole = xxhash.xxh3_128(str(how).encode())
    for path in paths:
        whole.update(identity(path) + b"\0")
    return whole.digest()


def prepared(address: bytes, how: Format) -> Prepared:
    """A photo as it is stored: resized until it just covers `how.size`, unless it is smaller.

    Raises whatever reading it raises.
    """
    picture = open_encoded(encoded(address), how.channels, how.pixel_range)
    image = picture.whole(how.size)
    wanted = covering(image.shape[1], image.shape[2], how.size)
    if sum(wanted) < sum(image.shape[1:]):
        image = resized(image, [*wanted])
    rows, columns = image.shape[-2:]
    data = jpeg_bytes(image, QUALITY) if how.layout == "jpeg" else image.permute(1, 2, 0).contiguous().flatten()
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
        with suppress(OSError):
            try:
                return cache_blocks.read(path, key, row)
            except DamagedError:
                os.unlink(path)  # the next run builds it again
        return None


def block_path(home: str, key: bytes) -> str:
    return os.path.join(home, key.hex() + cache_blocks.SUFFIX)


def measure_reading(
    folder: EncodedPhotos, recipe: Recipe, size: ImageSize, channels: int, seconds: float = SECONDS
) -> Reading | None:
    """Of some photos, in this process as in a loader worker, within about so many seconds; None: none can be read.

    A photo that was read before may come from the page cache, as it does in training.
    """
    index = np.random.default_rng(0).permutation(len(folder))[:PHOTOS]
    rows: list[tuple[float, float, float, float]] = []
    threads, ends = torch.get_num_threads(), time.perf_counter() + seconds
    torch.set_num_threads(1)  # as in a loader worker
    try:
        with private_draws():
            draws = PhotoDraws(recipe.augment, recipe.seed, 0, index)
            for row, place in enumerate(index.tolist()):
                if row < 2 or time.perf_counter() < ends:
                    with suppress(Exception):  # decoders raise anything at all; training reports it
                        rows.append(_of(folder, place, row, draws, recipe, size, channels))
    finally:
        torch.set_num_threads(threads)
    known = rows[1 if len(rows) > 1 else 0 :]  # the first one warms up
    return Reading(*(sum(part) / len(known) for part in zip(*known, strict=True))) if known else None


def _of(
    folder: EncodedPhotos, place: int, row: int, draws: PhotoDraws, recipe: Recipe, size: ImageSize, channels: int
) -> tuple[float, float, float, float]:
    """Seconds of reading, decoding and transforming a photo, and of all of it from the cache."""
    began, opened, spent = time.perf_counter(), 0.0, list[float]()
    if isinstance(folder, CachedFolder):
        picture = folder.open(place, channels)[0]
        read = time.perf_counter() - began
    else:
        data = encoded(folder.address(place))
        read = time.perf_counter() - began
        picture = open_encoded(data, channels, folder.pixel_range)
        opened = time.perf_counter() - began - read  # includes decoding, but of JPEGs

    def timed(factor: int) -> Tensor:
        began = time.perf_counter()
        image = picture.decode(factor)
        spent.append(time.perf_counter() - began)
        return image

    began = time.perf_counter()
    draws.apply(row, replace(picture, decode=timed), size)
    whole = time.perf_counter() - began
    kept = typed_size(recipe.data.cache_size) or shorter_side(size)
    how = Format(recipe.data.cache_format or "raw", kept, channels, folder.pixel_range)
    stored = prepared(folder.address(place), how)
    began = time.perf_counter()
    xxhash.xxh3_64_intdigest(stored.data.copy().data)  # as reading from the cache does
    draws.apply(row, picture_of(stored, how), size)
    return read, opened + spent[0], whole - spent[0], time.perf_counter() - began

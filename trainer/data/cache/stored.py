"""Photos in the cache: their format, their division into blocks, and reading them.

The name of a block is a hash of the format and of the paths, sizes and modification times of its
photos, so a block with changed photos gets a new name. If a photo was replaced by another photo of
the same size and time, the origins in the block reveal it (`cache_blocks.ORIGIN`).
"""

import errno
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
import xxhash
from torch import Tensor

from trainer.data.cache import cache_blocks
from trainer.data.cache.cache_blocks import DamagedError, Prepared
from trainer.data.encoded import (
    WHOLE,
    EncodedPhotos,
    compute_identity,
    hash_content,
    hash_location,
    read_encoded,
)
from trainer.data.photos.decoding import open_encoded
from trainer.data.photos.jpeg import decode_jpeg, encode_jpeg
from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.photo_reader import (
    BILINEAR,
    PhotoDraws,
    compute_shorter_side,
    covering_size,
    private_draws,
    resize,
)
from trainer.data.photos.pixel_range import Range, recipe_pixel_range
from trainer.data.sampling import Array
from trainer.recipe import Recipe
from trainer.recipe.image_sizes import ImageSize, sides, typed_size
from trainer.telemetry.verdict import Reading

# Mean and maximum number of photos per block.
PHOTOS_PER_BLOCK = 256
MAX_PHOTOS_PER_BLOCK = 4 * PHOTOS_PER_BLOCK
# Maximum number of photos whose reading is measured, and seconds after which the measurement stops.
MEASURED_PHOTOS = 32
SECONDS = 1.0
JPEG_QUALITY = 90
# Number of attempts to remove a block, and seconds between two attempts. Other processes that check
# the same block lock its draft for microseconds only.
MAX_ATTEMPTS = 500
RETRY_SECONDS = 0.02


@dataclass(frozen=True)
class Format:
    """The form in which photos are stored.

    Attributes:
        layout: "raw" for pixels, or "jpeg".
        size: size in pixels that a stored photo just covers: (height, width), or the length of the
            shorter side. Smaller photos are not enlarged.
        channels: number of channels; 1 or 3 for "jpeg".
        pixel_range: the recipe's data.pixel_range.
        interpolation: the recipe's data.interpolation.
    """

    layout: str
    size: ImageSize
    channels: int
    pixel_range: Range | None = None
    interpolation: str = BILINEAR

    # Increase this number whenever the stored pixels of an unchanged photo change. It is part of
    # the hash that names a block, so blocks of earlier versions are not used.
    VERSION = 3

    def __str__(self) -> str:
        text = f"{self.VERSION}-{self.layout}-{self.size}-{self.channels}-{self.pixel_range}"
        # Earlier versions only had bilinear interpolation, and their copies are still valid.
        if self.interpolation != BILINEAR:
            text += f"-{self.interpolation}"
        return text


def format_of(
    recipe: Recipe,
    image_size: ImageSize,
    channels: int,
) -> Format:
    """Return the format in which the cache stores photos that are resized to `image_size`."""
    data = recipe.data
    # By default, the size covers what evaluation, and training without random crops, resize to.
    evaluated = typed_size(data.resize) or compute_shorter_side(image_size)
    trained = evaluated
    if data.train_size is not None:
        trained = compute_shorter_side(typed_size(data.train_size) or image_size)
    height, width = map(max, sides(evaluated), sides(trained))
    size: ImageSize = (height, width)
    if height == width:
        size = height
    return Format(
        data.cache_format or "raw",
        typed_size(data.cache_size) or size,
        channels,
        recipe_pixel_range(data),
        data.interpolation,
    )


@dataclass(frozen=True)
class Packing:
    """The assignment of photos to blocks.

    Attributes:
        keys: name of each block.
        paths: addresses of the photos of each block.
        places: one array (photos, 2) int32 per folder: block of each photo, and row in that block.
    """

    keys: Sequence[bytes]
    paths: Sequence[Sequence[bytes]]
    places: Sequence[Array]


def pack(folders: Sequence[EncodedPhotos], photo_format: Format) -> Packing:
    """Divide the photos of all folders together into blocks.

    A block ends after a photo if the hash of the photo's path is divisible by `PHOTOS_PER_BLOCK`,
    or if the block is full. Adding or removing a photo therefore changes only blocks near it. This
    is like content-defined chunking in Muthitacharoen, Chen and Mazieres, "A low-bandwidth network
    file system", 2001, page 4, which hashes the bytes of files instead of paths.
    """
    paths = [[*map(folder.address, range(len(folder)))] for folder in folders]
    blocks: list[list[bytes]] = [[]]
    place_of = {}
    for path in sorted(set().union(*paths)):
        block = blocks[-1]
        place_of[path] = (len(blocks) - 1, len(block))
        block.append(path)
        is_full = len(block) >= MAX_PHOTOS_PER_BLOCK
        if is_full or not xxhash.xxh3_64_intdigest(path) % PHOTOS_PER_BLOCK:
            blocks.append([])
    if not blocks[-1]:
        blocks.pop()
    places = []
    for addresses in paths:
        rows = [place_of[path] for path in addresses]
        places.append(np.array(rows, np.int32).reshape(-1, 2))
    keys = [key_of(names, photo_format) for names in blocks]
    return Packing(keys, blocks, places)


def key_of(paths: Sequence[bytes], photo_format: Format) -> bytes:
    """Return the name of a block from the current state of its photos' files."""
    digest = xxhash.xxh3_128(str(photo_format).encode())
    for path in paths:
        digest.update(compute_identity(path) + b"\0")
    return digest.digest()


def origins_of(paths: Sequence[bytes]) -> Array:
    """Return the `ORIGIN` of each photo from the current state of its file."""
    origins = np.zeros(len(paths), cache_blocks.ORIGIN)
    origins["placing"] = [*map(hash_location, paths)]
    origins["content"] = [hash_content(path, WHOLE) for path in paths]
    return origins


def remove_changed(path: str, paths: Sequence[bytes]) -> None:
    """Remove a block if one of its photos was replaced by another photo of the same size and time.

    The inode and the change time of a file say whether the file may have been replaced. Its content
    then says whether the photo is a different one or an exact copy, for example after a whole data
    set was copied. Another process may remove or rebuild the block in the meantime, so only the
    file that was read here is removed or changed.

    Args:
        path: the block's file.
        paths: addresses of the block's photos.

    Raises:
        OSError: the block does not exist, or cannot be read or removed.
    """
    with open(path, "rb") as file:
        origins = cache_blocks.read_origins(file, len(paths))
        if origins is None:
            return
        locations = np.array([*map(hash_location, paths)], np.uint64)
        moved = np.flatnonzero(origins["placing"] != locations)
        if any(
            hash_content(paths[row], WHOLE) != origins["content"][row] for row in moved.tolist()
        ):
            for _ in range(MAX_ATTEMPTS):
                if cache_blocks.remove(path, file.fileno()):
                    return
                time.sleep(RETRY_SECONDS)
            raise BlockingIOError(
                errno.EAGAIN, "another process has claimed a block that is out of date", path
            )
        if len(moved):
            updated = origins.copy()
            updated["placing"] = locations
            # If the cache belongs to another user and is read-only, the origins stay as they are,
            # and the contents are compared again next time.
            with suppress(OSError), open(path, "r+b") as current:
                if os.path.sameopenfile(file.fileno(), current.fileno()):
                    current.seek(len(paths) * cache_blocks.ENTRY.itemsize)
                    current.write(cache_blocks.marked(updated))


def prepared(address: bytes, photo_format: Format) -> Prepared:
    """Decode a photo, reduce it to just cover `photo_format.size`, and encode it for the cache.

    A smaller photo keeps its size.

    Raises:
        Exception: reading and decoding can raise any exception.
    """
    picture = open_encoded(read_encoded(address), photo_format.channels, photo_format.pixel_range)
    image = picture.whole(photo_format.size)
    new_size = covering_size(image.shape[1], image.shape[2], photo_format.size)
    if sum(new_size) < sum(image.shape[1:]):
        image = resize(image, [*new_size], photo_format.interpolation)
    rows, columns = image.shape[-2:]
    if photo_format.layout == "jpeg":
        data = encode_jpeg(image, JPEG_QUALITY)
    else:
        data = image.permute(1, 2, 0).contiguous().flatten()
    return Prepared(picture.height, picture.width, rows, columns, data.numpy())


def picture_of(stored: Prepared, photo_format: Format) -> Picture:
    """Return a stored photo as a picture that reports the size of the original."""

    def decode(factor: int) -> Tensor:
        data = torch.from_numpy(stored.data)
        if photo_format.layout == "jpeg":
            return decode_jpeg(data, photo_format.channels)
        pixels = data.view(stored.rows, stored.columns, photo_format.channels)
        return pixels.permute(2, 0, 1)

    return Picture(stored.height, stored.width, decode)


class CachedFolder(EncodedPhotos):
    """Photos of a folder or of shards, read from the cache.

    A photo that is missing or damaged in the cache is prepared from its original file, which is
    slower and results in the same pixels.

    Attributes:
        folder: the original photos.
        photo_format: the form in which photos are stored.
        home: directory of the cache.
        uncached: number of photos that this process prepared because the cache lacked them.
    """

    def __init__(
        self,
        folder: EncodedPhotos,
        photo_format: Format,
        part: int = 0,
        home: Path | None = None,
        packing: Packing | None = None,
    ) -> None:
        """Read the photos of `folder` from the cache in `home`.

        Args:
            folder: the original photos.
            photo_format: the form in which photos are stored.
            part: index of `folder` among the folders of `packing`.
            home: directory of the cache.
            packing: the blocks; if None, every photo is prepared from its original file.
        """
        self.__dict__.update(vars(folder))
        self.folder = folder
        self.photo_format = photo_format
        self.home = str(home)
        self.uncached = 0
        self._keys: Sequence[bytes] = ()
        self._rows: Array | None = None
        if packing:
            self._keys = packing.keys
            self._rows = packing.places[part]

    def address(self, index: int) -> bytes:
        return self.folder.address(index)

    def part(self, rows: Array) -> Self:
        part = super().part(rows)
        part.folder = self.folder.part(rows)
        if self._rows is not None:
            part._rows = self._rows[rows]
        return part

    def open(self, index: int, channels: int) -> tuple[Picture, Tensor]:
        stored = None
        if self._rows is not None:
            block, row = self._rows[index].tolist()
            key = self._keys[block]
            with suppress(OSError, DamagedError):
                stored = cache_blocks.read(block_path(self.home, key), key, row)
        if stored is None:
            stored = prepared(self.address(index), self.photo_format)
            self.uncached += self._rows is not None
        return picture_of(stored, self.photo_format), torch.as_tensor(self.labels[index])


def block_path(home: str, key: bytes) -> str:
    """Return the path of a block's file."""
    return os.path.join(home, key.hex() + cache_blocks.SUFFIX)


def measure_reading(
    folder: EncodedPhotos,
    recipe: Recipe,
    size: ImageSize,
    channels: int,
    seconds: float = SECONDS,
) -> Reading | None:
    """Measure the time that a loader worker needs per photo.

    The measurement runs in this process, with one thread. Files that were read before may come from
    the page cache, as they do in training.

    Args:
        folder: the photos.
        recipe: the recipe, for its augmentation and its cache format.
        size: size of the model's images.
        channels: number of channels of the model's images.
        seconds: approximate time limit of the measurement.

    Returns:
        The mean times over some photos, or None if no photo can be read.
    """
    indices = np.random.default_rng(0).permutation(len(folder))[:MEASURED_PHOTOS]
    shorter = None if recipe.data.train_size else typed_size(recipe.data.resize)
    interpolation = recipe.data.interpolation
    draws = PhotoDraws(recipe.augment, recipe.seed, 0, indices, shorter, interpolation)
    photo_format = format_of(recipe, size, channels)
    train_size = typed_size(recipe.data.train_size) or size

    def measure(row: int, index: int) -> tuple[float, float, float, float]:
        """Return the fields of `Reading` for a photo: (read, decode, transform, cached)."""
        start = time.perf_counter()
        open_seconds = 0.0
        decode_seconds = list[float]()
        if isinstance(folder, CachedFolder):
            picture = folder.open(index, channels)[0]
            read_seconds = time.perf_counter() - start
        else:
            data = read_encoded(folder.address(index))
            read_seconds = time.perf_counter() - start
            picture = open_encoded(data, channels, folder.pixel_range)
            # Opening an image also decodes it, except for JPEG, which `picture.decode` decodes.
            open_seconds = time.perf_counter() - start - read_seconds

        def decode(factor: int) -> Tensor:
            start = time.perf_counter()
            image = picture.decode(factor)
            decode_seconds.append(time.perf_counter() - start)
            return image

        start = time.perf_counter()
        draws.apply(row, replace(picture, decode=decode), train_size)
        total_seconds = time.perf_counter() - start
        stored = prepared(folder.address(index), photo_format)
        start = time.perf_counter()
        # Copy and hash the bytes, as reading a photo from the cache does.
        xxhash.xxh3_64_intdigest(stored.data.copy().data)
        draws.apply(row, picture_of(stored, photo_format), train_size)
        return (
            read_seconds,
            open_seconds + decode_seconds[0],
            total_seconds - decode_seconds[0],
            time.perf_counter() - start,
        )

    timings = []
    threads = torch.get_num_threads()
    end = time.perf_counter() + seconds
    # Loader workers use one thread.
    torch.set_num_threads(1)
    try:
        with private_draws():
            for row, index in enumerate(indices.tolist()):
                if row < 2 or time.perf_counter() < end:
                    # Decoders can raise any exception. Training reports unreadable photos.
                    with suppress(Exception):
                        timings.append(measure(row, index))
    finally:
        torch.set_num_threads(threads)
    # The first photo includes warm-up, so leave it out if there are others.
    if len(timings) > 1:
        timings = timings[1:]
    if timings:
        return Reading(*np.mean(timings, axis=0).tolist())
    return None

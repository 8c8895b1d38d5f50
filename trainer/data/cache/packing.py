"""Which photos are in which block, and the blocks' names.

A block's name is a hash of all that its pixels depend on: the photos' paths, sizes and times, and the format. So a
block that exists is right, and one whose photos have changed has another name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from trainer.data.encoded import EncodedPhotos, identity
from trainer.data.photos.pixel_range import Range

TOGETHER = 256  # photos of a block, on average
MOST = 4 * TOGETHER
KEY = 16  # bytes


@dataclass(frozen=True)
class Format:
    """How photos are stored.

    Attributes:
        layout: "raw" pixels, or "jpeg".
        size: pixels of the shorter side; a photo that has fewer stays as it is.
        channels: 1 or 3.
        pixel_range: the recipe's data.pixel_range.
    """

    layout: str
    size: int
    channels: int
    pixel_range: Range | None = None

    VERSION = 2  # counts up when the pixels of the same photo change

    def __str__(self) -> str:
        return f"{self.VERSION}-{self.layout}-{self.size}-{self.channels}-{self.pixel_range}"


@dataclass(frozen=True)
class Packing:
    """Where the photos of some folders are in the cache.

    Attributes:
        keys: (blocks, KEY) uint8, their names.
        paths: of each block, the addresses of its photos.
        places: of each folder, (photos, 2) int32: block, and row in it.
    """

    keys: npt.NDArray[np.uint8]
    paths: Sequence[Sequence[bytes]]
    places: Sequence[npt.NDArray[np.int32]]


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

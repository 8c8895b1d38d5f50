"""Encoded images of one split, either one per file or many per shard.

The address of an image says where its bytes are, and is valid in every process of the machine. For
an image in a separate file, it is the path of the file. For an image in a shard, it contains the
shard's path, kind, size and modification time, and the two numbers of `ArchiveIndex.places`,
separated by zero bytes.
"""

import copy
import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
import torch
import xxhash
from torch import Tensor

from trainer.data.archives import parquet, tars
from trainer.data.archives.indexes import Archive
from trainer.data.photos.decoding import Bytes, open_encoded, read_file
from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.pixel_range import Range
from trainer.data.sampling import Array
from trainer.saving import files

# Number of bytes in each block that `hash_content` reads.
BLOCK = 2**14
# Numbers of blocks for `hash_content`: WHOLE covers images of up to 1 MiB completely, and FEW is
# small enough for a check of all images at each start of a run.
WHOLE, FEW = 64, 2
READ = {tars.KIND: tars.encoded, parquet.KIND: parquet.encoded}


def archive_prefix(shard: Archive, kind: bytes) -> bytes:
    """Return the bytes with which the addresses of all images of a shard start."""
    return b"%b\0%b\0%d\0%d\0" % (shard.path, kind, shard.size, shard.time)


def read_encoded(address: bytes) -> Bytes:
    """Return the encoded bytes of an image.

    Raises:
        OSError, ValueError: the file or shard cannot be read, or the shard has changed.
        Exception: pyarrow can raise any exception for a Parquet shard.
    """
    path, *rest = address.split(b"\0")
    if not rest:
        return read_file(path)
    kind, size, time, first, second = rest
    archive = Archive(path, int(size), int(time))
    return READ[kind](archive, int(first), int(second))


def open_header(address: bytes) -> BinaryIO:
    """Open an encoded image as a binary file, to read its header.

    For an image in a shard, the whole image is read into memory.

    Raises:
        Exception: the image cannot be read, as in `read_encoded`.
    """
    if b"\0" in address:
        return io.BytesIO(read_encoded(address).data)
    return files.open_regular(address)


def compute_identity(address: bytes) -> bytes:
    """Return the path, size and modification time of an image's file, as bytes.

    For an image in a shard, the result is the address, which contains these values of the shard. If
    the file is missing, its size and time are -1.
    """
    if b"\0" in address:
        return address
    try:
        status = os.stat(address)
    except OSError:
        # The file, or the target of a link, is missing. Training reports the missing image.
        return b"%b\0-1\0-1" % address
    return b"%b\0%d\0%d" % (address, status.st_size, status.st_mtime_ns)


def hash_location(address: bytes) -> int:
    """Return a hash of the inode and the change time of an image's file or shard.

    The hash changes if the file is replaced or copied. The result is 0 if the file is missing.
    """
    with suppress(OSError):
        status = os.stat(address.partition(b"\0")[0])
        return xxhash.xxh3_64_intdigest(b"%d %d" % (status.st_ino, status.st_ctime_ns))
    return 0


def hash_content(address: bytes, blocks: int) -> int:
    """Return a hash of about `blocks` blocks of the encoded image, at equal distances.

    The first and the last block are included. The result is 0 if the image cannot be read.
    """
    digest = xxhash.xxh3_64()
    # pyarrow can raise anything.
    with suppress(Exception), open_header(address) as file:
        size = file.seek(0, os.SEEK_END)
        step = max(BLOCK, size // blocks)
        last = max(0, size - BLOCK)
        for start in (*range(0, size, step), last):
            file.seek(start)
            digest.update(file.read(BLOCK))
        return digest.intdigest()
    return 0


def encoded_size(address: bytes) -> int:
    """Return the size of an encoded image in bytes.

    The result is -1 for a missing file, and for an image in a Parquet shard, whose size is unknown
    until the image is read.
    """
    parts = compute_identity(address).split(b"\0")
    if b"\0" not in address:
        return int(parts[1])
    return int(parts[-1]) if parts[1] == tars.KIND else -1


class EncodedPhotos(ABC):
    """The images of one split.

    All names are in one block of bytes, which is small and fast to send to workers.

    Attributes:
        root: the folder or file that contains the images.
        labels: (samples, ...) targets.
        pixel_range: the recipe's data.pixel_range.
    """

    pixel_range: Range | None = None

    def __init__(
        self,
        root: Path,
        names: Iterable[str],
        labels: Array,
    ) -> None:
        """Create a set of the images `names`, paths below `root`, with the targets `labels`."""
        self.root = str(root)
        self.labels = labels
        encoded_names = [*map(os.fsencode, names)]
        self._names = b"".join(encoded_names)
        self._ends = np.cumsum([*map(len, encoded_names)], dtype=np.int64)

    @abstractmethod
    def address(self, index: int) -> bytes:
        """Return the address of an image, as the docstring of this module defines it."""

    def __len__(self) -> int:
        return len(self._ends)

    def name(self, index: int) -> str:
        """Return the path of an image below the root."""
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._names[start : self._ends[index]])

    def list_names(self) -> list[str]:
        """Return the paths of all images below the root."""
        return [*map(self.name, range(len(self)))]

    def where(self, index: int) -> str:
        """Return the path of an image."""
        return os.path.join(self.root, self.name(index))

    def digest(self) -> str:
        """Return a hash of names and targets. It does not depend on the path of the folder."""
        digest = hashlib.blake2b(self._names, digest_size=16)
        for values in (self._ends, self.labels):
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()

    def open(self, index: int, channels: int) -> tuple[Picture, Tensor]:
        """Return a sample's image, which is not decoded yet, and its target."""
        picture = open_encoded(read_encoded(self.address(index)), channels, self.pixel_range)
        return picture, torch.as_tensor(self.labels[index])

    def read(self, index: int, channels: int) -> tuple[Tensor, Tensor]:
        """Return a sample's image in full size, and its target."""
        picture, label = self.open(index, channels)
        return picture.whole(max(picture.height, picture.width)), label

    def part(self, rows: Array) -> Self:
        """Return the subset of the images with the indices `rows`."""
        part = copy.copy(self)
        names = map(self.name, rows)
        EncodedPhotos.__init__(part, Path(self.root), names, self.labels[rows])
        return part

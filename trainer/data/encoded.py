"""Encoded images of one split: in a file each, or many in a shard.

An image's address says where its bytes are, in every process of the machine: the path of its file; or, separated by
zero bytes, the path of a shard, its kind, size and time of change, and two numbers that depend on its kind.
"""

from __future__ import annotations

import copy
import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.data.archives import parquet, tars
from trainer.data.archives.indexes import Archive
from trainer.data.photos.decoding import Bytes, open_encoded, read_file
from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.pixel_range import Range
from trainer.saving import files

READ = {tars.KIND: tars.encoded, parquet.KIND: parquet.encoded}


def in_archive(shard: Archive, kind: bytes) -> bytes:
    """The first bytes of the addresses of a shard's images."""
    return b"%b\0%b\0%d\0%d\0" % (shard.path, kind, shard.size, shard.time)


def encoded(address: bytes) -> Bytes:
    """The bytes of an image. Raises OSError, ValueError."""
    path, *rest = address.split(b"\0")
    if not rest:
        return read_file(path)
    kind, size, time, *place = rest
    first, second = map(int, place)
    return READ[kind](Archive(path, int(size), int(time)), first, second)


def header_file(address: bytes) -> BinaryIO:
    """A file to read an image's header from. Raises OSError, ValueError."""
    return io.BytesIO(encoded(address).data) if b"\0" in address else files.opened(address)


def identity(address: bytes) -> bytes:
    """Bytes that change when the image may have changed."""
    if b"\0" in address:
        return address
    try:
        facts = os.stat(address)
        size, changed = facts.st_size, facts.st_mtime_ns
    except OSError:  # such as a broken link: training reports it
        size = changed = -1
    return b"%b\0%d\0%d" % (address, size, changed)


def size_of(address: bytes) -> int:
    """The image's size in bytes; -1 where it is missing, or the size is not known without reading."""
    parts = identity(address).split(b"\0")
    in_file, in_tar = b"\0" not in address, parts[1] == tars.KIND
    return int(parts[1]) if in_file else int(parts[-1]) if in_tar else -1


class EncodedPhotos(ABC):
    """The images of one split. All names are one block of bytes: cheap to hold and to send to workers."""

    pixel_range: Range | None = None  # the recipe's data.pixel_range

    def __init__(self, root: Path, names: Iterable[str], labels: npt.NDArray[Any]) -> None:
        """`names` are paths below `root`, `labels` (names, ...) their targets."""
        self.root, self.labels = str(root), labels
        listed = [os.fsencode(name) for name in names]
        self._names = b"".join(listed)
        self._ends = np.cumsum([len(name) for name in listed], dtype=np.int64)

    @abstractmethod
    def address(self, index: int) -> bytes:
        """Of an image: see the module."""

    def __len__(self) -> int:
        return len(self._ends)

    def name(self, index: int) -> str:
        """Its path below the root."""
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._names[start : self._ends[index]])

    def where(self, index: int) -> str:
        return os.path.join(self.root, self.name(index))

    def digest(self) -> str:
        """A hash of names and targets, which does not depend on where the folder is."""
        digest = hashlib.blake2b(self._names, digest_size=16)
        for values in (self._ends, self.labels):
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()

    def open(self, index: int, channels: int) -> tuple[Picture, Tensor]:
        picture = open_encoded(encoded(self.address(index)), channels, self.pixel_range)
        return picture, torch.as_tensor(self.labels[index])

    def read(self, index: int, channels: int) -> tuple[Tensor, Tensor]:
        picture, label = self.open(index, channels)
        return picture.whole(max(picture.height, picture.width)), label

    def part(self, rows: npt.NDArray[Any]) -> Self:
        """Some of them."""
        part = copy.copy(self)
        EncodedPhotos.__init__(part, Path(self.root), (self.name(row) for row in rows), self.labels[rows])
        return part

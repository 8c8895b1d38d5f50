"""A block: some hundred prepared photos in one file, each with a hash, so that no damage reaches a model.

A file is a table with an `ENTRY` for each photo, and then the photos' bytes. A photo that could not be prepared has an
entry of zeros. A hash covers the bytes, the entry, and which photo of which block it is: another block's table, or a
renamed block, counts as damage.

Files are read, not mapped: reading a mapped file that was truncated ends the process with SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]
ENTRY = np.dtype(
    [
        ("start", "<u8"),  # of its bytes in the file
        ("bytes", "<u8"),
        ("height", "<u4"),  # of the original photo, upright
        ("width", "<u4"),
        ("rows", "<u4"),  # as stored
        ("columns", "<u4"),
        ("check", "<u8"),
    ]
)
HASHED = ENTRY.itemsize - 8  # bytes of an entry before its check
SUFFIX, DRAFT = ".block", ".part"


class DamagedError(Exception):
    """A block does not hold what was written."""


@dataclass(frozen=True)
class Prepared:
    """A photo as it is stored."""

    height: int  # of the original, upright
    width: int
    rows: int  # as stored
    columns: int
    data: Bytes  # its bytes: uint8 pixels (rows, columns, channels), or a JPEG


def write(file: BufferedRandom, key: bytes, photos: Iterable[Prepared | None], count: int) -> None:
    """Write a block to an empty file, and sync it to the disk; None is a photo left out. Raises OSError."""
    table = np.zeros(count, ENTRY)
    place = table.nbytes
    file.seek(place)
    for row, photo in enumerate(photos):
        if photo is None:
            continue
        shape = (photo.height, photo.width, photo.rows, photo.columns)
        table[row] = (place, photo.data.nbytes, *shape, 0)
        table[row]["check"] = _check(key, row, table[row], photo.data)
        file.write(photo.data.data)
        place += photo.data.nbytes
    file.seek(0)
    file.write(table.tobytes())
    file.flush()
    os.fsync(file.fileno())


def read(path: str | Path, key: bytes, row: int) -> Prepared | None:
    """One photo of a block; None where it was left out. Raises FileNotFoundError, DamagedError, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        entry = np.empty(1, ENTRY)
        _fill(descriptor, entry.view(np.uint8), row * ENTRY.itemsize)
        start, length, height, width, rows, columns, check = entry[0].tolist()
        if start + length > os.fstat(descriptor).st_size:  # before it is allocated
            raise DamagedError(path)
        data = np.empty(length, np.uint8)
        _fill(descriptor, data, start)
    finally:
        os.close(descriptor)
    if not length and not check and not entry.view(np.uint8).any():
        return None
    if check != _check(key, row, entry[0], data):
        raise DamagedError(path)
    return Prepared(height, width, rows, columns, data)


def _fill(descriptor: int, buffer: Bytes, place: int) -> None:
    if os.preadv(descriptor, [buffer.data], place) < buffer.nbytes:
        raise DamagedError("it ends too early")


def _check(key: bytes, row: int, entry: Any, data: Bytes) -> int:
    """The hash of an entry, without its check, and its data."""
    head = key + row.to_bytes(4, "little") + entry.tobytes()[:HASHED]
    return xxhash.xxh3_64_intdigest(data.data, seed=xxhash.xxh3_64_intdigest(head))

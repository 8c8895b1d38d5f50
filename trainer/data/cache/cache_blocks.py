"""A block: some hundred prepared photos in one file, each with a hash, so that no damage reaches a model.

A file is a table of `ENTRY`, one a photo, and behind it what the entries point at. A photo that could not be prepared
has an entry of no bytes. A hash covers the bytes, what the entry says of them, and which photo of which block it is:
a table that was exchanged, or a block that was renamed, is damage too.

Files are read, not mapped: of a mapped file that is cut while it is in use, the next look ends the process.
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
        ("height", "<u4"),  # of the photo itself, upright
        ("width", "<u4"),
        ("rows", "<u4"),  # as it is stored
        ("columns", "<u4"),
        ("check", "<u8"),
    ]
)
TOLD = ENTRY.itemsize - 8  # bytes of an entry before its check
SUFFIX, DRAFT = ".block", ".part"


class DamagedError(Exception):
    """What a block holds is not what was written."""


@dataclass(frozen=True)
class Prepared:
    """A photo as it is stored.

    Attributes:
        height, width: of the photo itself, upright.
        rows, columns: as it is stored.
        data: its bytes: uint8 pixels (rows, columns, channels), or a JPEG.
    """

    height: int
    width: int
    rows: int
    columns: int
    data: Bytes


def write(file: BufferedRandom, key: bytes, photos: Iterable[Prepared | None], count: int) -> None:
    """Fill an empty file with a block of `count` photos, on the disk when this returns; None is one left out.

    Raises:
        OSError: it cannot be written.
    """
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
    """One photo of a block; None where it was left out.

    Raises:
        FileNotFoundError: there is no such block.
        DamagedError: it is not as it was written.
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        entry = np.empty(1, ENTRY)
        _fill(descriptor, entry.view(np.uint8), row * ENTRY.itemsize)
        start, length, height, width, rows, columns, check = entry[0].tolist()
        if start + length > os.fstat(descriptor).st_size:  # before as much is allocated
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


def count(path: str | Path) -> int:
    """How many photos a block has a place for; 0 where that cannot be told."""
    try:
        with open(path, "rb") as file:
            table = np.frombuffer(file.read(4096 * ENTRY.itemsize), np.uint8)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return 0
    entries = table[: len(table) // ENTRY.itemsize * ENTRY.itemsize].view(ENTRY)
    taken = np.flatnonzero(entries["bytes"])
    first = int(entries["start"][taken[0]]) if len(taken) else size  # its bytes begin where the table ends
    return first // ENTRY.itemsize if first % ENTRY.itemsize == 0 and first <= size else 0


def verified(path: Path) -> int:
    """How many photos a block holds, each read and held against its hash.

    Raises:
        DamagedError: one is not as it was written.
    """
    key, rows = bytes.fromhex(path.name.removesuffix(SUFFIX)), count(path)
    if not rows:
        raise DamagedError(path)
    return sum(read(path, key, row) is not None for row in range(rows))


def _fill(descriptor: int, buffer: Bytes, place: int) -> None:
    done = 0
    while done < buffer.nbytes:
        some = os.preadv(descriptor, [buffer[done:].data], place + done)
        if not some:
            raise DamagedError("it ends too early")
        done += some


def _check(key: bytes, row: int, entry: Any, data: Bytes) -> int:
    """The hash that an entry has to have; what it has is not looked at."""
    told = entry.tobytes()[:TOLD]
    return xxhash.xxh3_64_intdigest(data.data, seed=xxhash.xxh3_64_intdigest(key + row.to_bytes(4, "little") + told))

"""Block files of the cache: a few hundred prepared photos per file, each with a hash.

Layout of a file:

    ENTRY x count     a table: position, sizes and hash of each photo
    ORIGIN x count    the original file of each photo, to detect replaced photos
    MARK              end of the origins; blocks of earlier versions have neither origins nor mark
    bytes             the photos, one after the other

The entry of a photo that could not be prepared is all zeros. The hash covers the photo's bytes, its
entry, its row in the block, and the key of the block. A table copied from another block, or a
renamed block, is therefore detected as damage, and damaged pixels never reach a model.

Files are read, not mapped: reading a mapped file that was truncated kills the process with SIGBUS.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from io import BufferedRandom
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from trainer.data.sampling import Array
from trainer.saving import locks

# Table entry of a photo: offset of its bytes in the file, number of bytes, height and width of the
# original photo after its EXIF rotation, height and width of the stored image, and the hash.
ENTRY = np.dtype(
    [
        ("start", "<u8"),
        ("bytes", "<u8"),
        ("height", "<u4"),
        ("width", "<u4"),
        ("rows", "<u4"),
        ("columns", "<u4"),
        ("check", "<u8"),
    ]
)
# Number of bytes of an entry that precede its hash.
HASHED = ENTRY.itemsize - 8
# Two hashes for each photo: `encoded.hash_location` of its file's inode and change time, and
# `encoded.hash_content` of the image's bytes.
ORIGIN = np.dtype([("placing", "<u8"), ("content", "<u8")])
MARK = b"ORIGINS1"
SUFFIX = ".block"
# Suffix of a block that is still being written.
DRAFT = ".part"


class DamagedError(Exception):
    """Raised if a block does not contain what was written to it."""


class Prepared(NamedTuple):
    """A photo in the form in which the cache stores it.

    Attributes:
        height: height of the original in pixels, after its EXIF rotation.
        width: width of the original in pixels, after its EXIF rotation.
        rows: height of the stored image in pixels.
        columns: width of the stored image in pixels.
        data: uint8 pixels (rows, columns, channels), or the bytes of a JPEG.
    """

    height: int
    width: int
    rows: int
    columns: int
    data: Array


def write(
    file: BufferedRandom,
    key: bytes,
    photos: Iterable[Prepared | None],
    count: int,
    origins: bytes = b"",
) -> None:
    """Write a block to an empty file and sync it to the disk.

    Args:
        file: the empty file.
        key: name of the block, which the hashes cover.
        photos: `count` photos; None stands for a photo that could not be prepared.
        count: number of photos.
        origins: bytes to write after the table: see `marked`.

    Raises:
        OSError: the file cannot be written.
    """
    table = np.zeros(count, ENTRY)
    offset = table.nbytes + len(origins)
    file.seek(offset)
    for row, photo in enumerate(photos):
        if photo is None:
            continue
        *sizes, data = photo
        table[row] = (offset, data.nbytes, *sizes, 0)
        table[row]["check"] = _check(key, row, table[row], data)
        file.write(data.data)
        offset += data.nbytes
    file.seek(0)
    file.write(table.tobytes() + origins)
    file.flush()
    os.fsync(file.fileno())


def read(
    path: str | Path,
    key: bytes,
    row: int,
) -> Prepared | None:
    """Read one photo of a block.

    Args:
        path: the block's file.
        key: name of the block.
        row: index of the photo in the block.

    Returns:
        The photo, or None if it could not be prepared when the block was built.

    Raises:
        DamagedError: the bytes are not those that were written. The block is removed if possible,
            so that the next run builds it again.
        OSError: the block does not exist, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        entry = np.empty(1, ENTRY)
        _fill(descriptor, entry.view(np.uint8), row * ENTRY.itemsize)
        start, length, height, width, rows, columns, check = entry[0].tolist()
        # Check the length before memory is allocated: a damaged entry can contain any number.
        if start + length > os.fstat(descriptor).st_size:
            raise DamagedError(path)
        data = np.empty(length, np.uint8)
        _fill(descriptor, data, start)
        if not entry.view(np.uint8).any():
            return None
        if check != _check(key, row, entry[0], data):
            raise DamagedError(path)
        return Prepared(height, width, rows, columns, data)
    except DamagedError:
        with suppress(OSError):
            remove(path, descriptor)
        raise
    finally:
        os.close(descriptor)


def remove(path: str | Path, descriptor: int) -> bool:
    """Remove the block that is open as `descriptor`.

    If another process has replaced the block by a newer one of the same name, the newer one is
    kept. Every process claims the draft of a block before it builds or removes the block, so no
    block is built at `path` during the removal.

    Args:
        path: name of the block's file.
        descriptor: the open file.

    Returns:
        True if the block is gone, False if another process is building or removing it now.

    Raises:
        OSError: the block cannot be removed.
    """
    path = Path(path)
    with locks.claim_file(path.with_suffix(DRAFT)) as draft:
        if not locks.is_at(descriptor, path):
            return True
        if draft:
            os.unlink(path)
        return draft is not None


def marked(origins: Array) -> bytes:
    """Return the bytes that follow a block's table: the origins and their end mark."""
    return origins.tobytes() + MARK


def read_origins(file: BinaryIO, count: int) -> Array | None:
    """Return the `ORIGIN` of each photo of a block.

    Args:
        file: the block.
        count: number of photos in the block.

    Returns:
        An array (count,), or None if an earlier version wrote the block.

    Raises:
        OSError: the block cannot be read.
    """
    file.seek(count * ENTRY.itemsize)
    origins = file.read(count * ORIGIN.itemsize)
    if file.read(len(MARK)) == MARK:
        return np.frombuffer(origins, ORIGIN)
    return None


def _fill(descriptor: int, buffer: Array, offset: int) -> None:
    if os.preadv(descriptor, [buffer.data], offset) < buffer.nbytes:
        raise DamagedError("it ends too early")


def _check(key: bytes, row: int, entry: Any, data: Array) -> int:
    """Return the hash of a photo.

    The hash covers the block's name, the photo's row, its entry up to the hash, and its bytes.
    """
    head = key + row.to_bytes(4, "little") + entry.tobytes()[:HASHED]
    return xxhash.xxh3_64_intdigest(data.data, seed=xxhash.xxh3_64_intdigest(head))

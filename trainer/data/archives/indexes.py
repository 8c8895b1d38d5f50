"""Shards, which must not change during a run, and their indexes.

An index lists the samples of a shard: names, classes, and the positions of the images. Indexes are
stored in the data folder, because reading all headers of a shard is slow. The name of an index
file is a hash of the shard's path, and the file contains the size and the modification time of the
shard. If the shard has changed, or the index file is damaged, the index is made again. If a process
is killed while it writes an index, it leaves a temporary file, which the next process overwrites.

A process that reads a shard checks that the file is still the one that was indexed. Each process
keeps the `MAX_OPEN_SHARDS` most recently read shards open.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from trainer.data.downloads import get_data_folder
from trainer.data.sampling import Array
from trainer.saving import files, locks

# Maximum number of shards that a process keeps open.
MAX_OPEN_SHARDS = 64
# Version of the index files. Increase it whenever their contents change: files of another version
# are not loaded.
VERSION = 4
FOLDER = "shards"
# Attributes of an index that are stored as arrays.
ARRAYS = ("names", "places", "labels", "folders")


class Archive(NamedTuple):
    """A shard file, with the size and modification time that it had when it was first opened.

    Attributes:
        path: absolute path.
        size: size in bytes.
        time: time of the last modification, in nanoseconds since 1970.
    """

    path: bytes
    size: int
    time: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Archive:
        """Create a record of a file with its current size and modification time.

        Raises:
            OSError: the file cannot be accessed.
        """
        status = os.stat(path)
        return cls(os.path.abspath(os.fsencode(path)), status.st_size, status.st_mtime_ns)

    def __str__(self) -> str:
        return os.fsdecode(self.path)


@lru_cache(maxsize=MAX_OPEN_SHARDS)
def open_shard(shard: Archive) -> BufferedReader:
    """Open a shard's file.

    The file is closed with the last reference to it, not when it is evicted from the cache, because
    a thread may still read it then.

    Raises:
        OSError: the shard cannot be opened, or has changed.
    """
    file = files.open_regular(shard.path)
    status = os.fstat(file.fileno())
    if (status.st_size, status.st_mtime_ns) != (shard.size, shard.time):
        raise OSError(f"{shard} was changed after this run began")
    return file


@dataclass(frozen=True)
class ArchiveIndex:
    """The samples of a shard, without their images.

    Attributes:
        names: names of all samples as uint8 bytes, each name followed by a zero byte.
        places: (samples, 2) int64, position of each image in the shard: offset and size in bytes
            in a tar file, row group and row in a Parquet file.
        labels: (samples,) int32, index of each sample's class in `texts`; -1 for no class.
        folders: (samples,) int32, index of each image's directory in `below`.
        texts: the different classes as written in the shard.
        classes: names of classes 0, 1, ... if the shard lists them; the strings in `texts` are then
            class numbers. None if the shard has no such list.
        below: directories in the shard that contain images.
        left: number of ignored files for each description of such files (see `LeftOut`).
    """

    names: Array
    places: Array
    labels: Array
    folders: Array
    texts: list[str]
    classes: list[str] | None
    below: list[str]
    left: dict[str, int]

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def of(cls, rows: Mapping[bytes, tuple[int, int, int, int]], *contents: Any) -> ArchiveIndex:
        """Create an index.

        Args:
            rows: for each sample's name, its values in `places` (two numbers), `labels` and
                `folders`.
            contents: the attributes `texts`, `classes`, `below` and `left`.
        """
        table = np.array([*rows.values()], np.int64).reshape(-1, 4)
        places = table[:, :2].copy()
        labels, folders = table[:, 2:].T.astype(np.int32)
        names = np.frombuffer(b"".join(name + b"\0" for name in rows), np.uint8)
        return cls(names, places, labels, folders, *contents)

    def list_names(self) -> list[str]:
        """Return the names of all samples."""
        return [*map(os.fsdecode, self.names.tobytes().split(b"\0")[:-1])]


def load_or_make(
    shard: Archive,
    how: str,
    make: Callable[[Archive], ArchiveIndex],
) -> ArchiveIndex:
    """Load the index of a shard from its file, or make it and try to write the file.

    Args:
        shard: the shard.
        how: description of how `make` reads the shard. A stored index is used only if it was made
            with the same description.
        make: function that reads the shard and returns its index. This function's exceptions are
            not caught.
    """
    path = index_path(shard)
    about = {
        "version": VERSION,
        "how": how,
        "path": os.fsdecode(os.path.realpath(shard.path)),
        "size": shard.size,
        "time": shard.time,
    }
    status = os.stat(shard.path)
    # Size and modification time do not reveal every replacement of a shard, so also compare the
    # inode and the change time.
    about |= {"inode": status.st_ino, "changed": status.st_ctime_ns}
    # The file is a zip archive with checksums, and loading a damaged one can raise any exception.
    # Suppress the exception, because the index is then made again below.
    with suppress(Exception), open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
        stored_about = json.loads(stored["about"].tobytes())
        contents = stored_about.pop("contents")
        if stored_about == about:
            arrays = {key: stored[key] for key in ARRAYS}
            return ArchiveIndex(**arrays, **contents)
    index = make(shard)
    contents = dict(vars(index))
    arrays = {key: contents.pop(key) for key in ARRAYS}
    text = json.dumps({**about, "contents": contents}).encode()
    # If the disk is full, or the data folder belongs to another user, the index is not stored, and
    # is made again next time.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        with locks.claim_file(draft) as draft_file:
            if draft_file:
                np.savez(draft_file, about=np.frombuffer(text, np.uint8), **arrays)
                draft_file.flush()
                os.replace(draft, path)
    return index


def index_path(shard: Archive) -> Path:
    """Return the path of a shard's index file."""
    key = xxhash.xxh3_64_hexdigest(os.path.realpath(shard.path))
    return get_data_folder() / FOLDER / f"{key}.npz"

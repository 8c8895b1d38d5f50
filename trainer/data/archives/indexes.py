"""A shard as it was when it was indexed, and its index: its samples without their images, kept in the data folder.

Reading a shard later gives the same bytes, or raises. A process keeps the last `OPEN` that it reads from open.

The index's file is named by the shard's path and says which size and time that had: where the shard has changed, or the
file is damaged, it is made anew. A process that is killed while writing leaves a draft, which the next one overwrites.
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
import numpy.typing as npt
import xxhash

from trainer.data.downloads import data_folder
from trainer.data.sampling import Array
from trainer.recipe import DataRecipe
from trainer.saving import files, locks

Bytes = npt.NDArray[np.uint8]
OPEN = 64  # shards that a process holds open
VERSION = 4  # counts up when the contents change
FOLDER = "shards"
ARRAYS = ("names", "places", "labels", "folders")  # of an index


class Archive(NamedTuple):
    """A file that holds many images."""

    path: bytes
    size: int  # bytes
    time: int  # of its last change, in nanoseconds since 1970

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Archive:
        """Raises OSError."""
        facts = os.stat(path)
        return cls(os.path.abspath(os.fsencode(path)), facts.st_size, facts.st_mtime_ns)

    def __str__(self) -> str:
        return os.fsdecode(self.path)

    def read(self, start: int, size: int) -> Bytes:
        """Raises OSError."""
        file, data = opened(self), np.empty(size, np.uint8)
        if os.preadv(file.fileno(), [data.data], start) < size:
            raise OSError(f"{self} was cut since this run began")
        return data


@lru_cache(maxsize=OPEN)
def opened(shard: Archive) -> BufferedReader:
    """Its file, closed with its last reference: threads may still read one that left the cache. Raises OSError."""
    file = files.opened(shard.path)
    facts = os.fstat(file.fileno())
    if (facts.st_size, facts.st_mtime_ns) != (shard.size, shard.time):
        raise OSError(f"{shard} was changed since this run began")
    return file


@dataclass(frozen=True)
class ArchiveIndex:
    """The samples of a shard, and what it holds beside their images."""

    names: Array  # of all samples, each with a zero byte behind it
    places: Array  # (samples, 2) int64, where a sample's image is, as its kind of shard counts
    labels: Array  # (samples,) int32, a sample's class as a place in `texts`; -1 for none
    folders: Array  # (samples,) int32, places in `below`
    texts: list[str]  # its classes as it writes them
    classes: list[str] | None  # the names of all classes, where it has them; `texts` are then their numbers
    below: list[str]  # folders within it that hold images
    left: dict[str, int]  # how many files are not read, by what they are

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def of(cls, rows: Mapping[bytes, tuple[int, int, int, int]], *contents: Any) -> ArchiveIndex:
        """`rows` are the places, label and folder of each sample, by name; `contents` all else."""
        table = np.array([*rows.values()], np.int64).reshape(-1, 4)
        joined = np.frombuffer(b"".join(name + b"\0" for name in rows), np.uint8)
        return cls(joined, table[:, :2].copy(), *table[:, 2:].T.astype(np.int32), *contents)

    def listed(self) -> list[str]:
        """The names of all samples."""
        return [os.fsdecode(name) for name in self.names.tobytes().split(b"\0")[:-1]]


def kept(shard: Archive, how: str, make: Callable[[Archive], ArchiveIndex]) -> ArchiveIndex:
    """A shard's index, from its file, else made anew and written where that is possible.

    `how` is what `make` depends on beside the shard. Raises whatever `make` raises.
    """
    path, real = path_of(shard), os.fsdecode(os.path.realpath(shard.path))
    about = {"version": VERSION, "how": how, "path": real, "size": shard.size, "time": shard.time}
    # Reading a damaged one raises anything at all; it is a zip, with checksums.
    with suppress(Exception), open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
        facts = json.loads(stored["about"].tobytes())
        contents = facts.pop("contents")
        if facts == about:
            return ArchiveIndex(**{key: stored[key] for key in ARRAYS}, **contents)
    index = make(shard)
    contents = {key: value for key, value in vars(index).items() if key not in ARRAYS}
    text = json.dumps({**about, "contents": contents}).encode()
    with suppress(OSError):  # the disk is full, or not ours
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        with locks.claimed(draft) as written:
            if written is not None:
                np.savez(written, about=np.frombuffer(text, np.uint8), **{key: getattr(index, key) for key in ARRAYS})
                written.flush()
                os.replace(draft, path)
    return index


def path_of(shard: Archive) -> Path:
    """The file of a shard's index."""
    key = xxhash.xxh3_64_hexdigest(os.path.realpath(shard.path))
    return data_folder(DataRecipe()) / FOLDER / f"{key}.npz"

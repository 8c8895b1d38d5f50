"""A shard as it was when it was indexed, and its index: its samples without their images, kept in the data folder.

Reading a shard later gives the same bytes, or raises. A process keeps the last `OPEN` that it reads from open.

The index's file is named by the shard's path and says which size and time that had: where the shard has changed, or the
file is damaged, it is made anew. A process that is killed while writing leaves a draft, which the next one overwrites.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from trainer.data.downloads import data_folder
from trainer.data.sampling import Array
from trainer.recipe import DataRecipe
from trainer.saving import locks

Bytes = npt.NDArray[np.uint8]
OPEN = 64  # shards that a process holds open
VERSION = 3  # counts up when the contents change
FOLDER = "shards"
ARRAYS = ("names", "places", "labels", "folders")


class ShardFile(NamedTuple):
    """A file that holds many images."""

    path: bytes
    size: int  # bytes
    time: int  # of its last change, in nanoseconds since 1970

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> ShardFile:
        """Raises OSError."""
        facts = os.stat(path)
        return cls(os.path.abspath(os.fsencode(path)), facts.st_size, facts.st_mtime_ns)

    def __str__(self) -> str:
        return os.fsdecode(self.path)

    def read(self, start: int, size: int) -> Bytes:
        """Raises OSError."""
        file = opened(self)
        data = np.empty(size, np.uint8)
        done = 0
        while done < size:
            some = os.preadv(file.descriptor, [data[done:].data], start + done)
            if not some:
                raise OSError(f"{self} was cut since this run began")
            done += some
        return data


class OpenShard:
    """A descriptor that is closed with its last reference: threads may still read one that left the cache."""

    def __init__(self, path: bytes) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.facts = os.fstat(self.descriptor)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@lru_cache(maxsize=OPEN)
def opened(shard: ShardFile) -> OpenShard:
    """Raises OSError."""
    file = OpenShard(shard.path)
    if not stat.S_ISREG(file.facts.st_mode):
        raise OSError(f"{shard} is not a file")
    if (file.facts.st_size, file.facts.st_mtime_ns) != (shard.size, shard.time):
        raise OSError(f"{shard} was changed since this run began")
    return file


@dataclass(frozen=True)
class Contents:
    """What a shard holds beside its images."""

    texts: list[str]  # its classes as it writes them
    names: list[str] | None = None  # the names of all classes, where it has them; `texts` are then their numbers
    below: list[str] = field(default_factory=lambda: [""])  # folders within it that hold images
    left: dict[str, int] = field(default_factory=dict)  # how many files are not read: hidden, empty, links, by suffix
    # samples that are left out, by reason: how many, and the first one's name
    wrong: dict[str, tuple[int, str]] = field(default_factory=dict)
    broken: str = ""  # why it could not be read to its end; empty where it was
    note: str = ""  # for a run's banner


@dataclass(frozen=True)
class ShardIndex:
    """The samples of a shard."""

    names: Array  # of all samples, each with a zero byte behind it
    places: Array  # (samples, 2) int64, where a sample's image is, as its kind of shard counts
    labels: Array  # (samples,) int32, a sample's class as a place in `contents.texts`; -1 for none
    folders: Array  # (samples,) int32, places in `contents.below`
    contents: Contents

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def of(
        cls,
        names: Iterable[bytes],
        places: Iterable[tuple[int, int]],
        labels: Iterable[int],
        folders: Iterable[int],
        contents: Contents,
    ) -> ShardIndex:
        joined = np.frombuffer(b"".join(name + b"\0" for name in names), np.uint8)
        where = np.array(list(places), np.int64).reshape(-1, 2)
        return cls(joined, where, np.fromiter(labels, np.int32), np.fromiter(folders, np.int32), contents)

    def listed(self) -> list[str]:
        """The names of all samples."""
        return [os.fsdecode(name) for name in self.names.tobytes().split(b"\0")[:-1]]


def kept(shard: ShardFile, how: str, make: Callable[[ShardFile], ShardIndex]) -> ShardIndex:
    """A shard's index, from its file, else made anew and written where that is possible.

    `how` is what `make` depends on beside the shard. Raises whatever `make` raises.
    """
    path = path_of(shard)
    real = os.fsdecode(os.path.realpath(shard.path))
    about = {"version": VERSION, "how": how, "path": real, "size": shard.size, "time": shard.time}
    index = read(path, about)
    if index is None:
        index = make(shard)
        with suppress(OSError):  # the disk is full, or not ours
            write(path, about, index)
    return index


def path_of(shard: ShardFile) -> Path:
    """The file of a shard's index."""
    key = xxhash.xxh3_64_hexdigest(os.path.realpath(shard.path))
    return data_folder(DataRecipe()) / FOLDER / f"{key}.npz"


def read(path: Path, about: Mapping[str, Any]) -> ShardIndex | None:
    """An index; None where there is none, one of another shard, or a damaged one."""
    # Reading a damaged one raises anything at all; it is a zip, with checksums.
    with suppress(Exception), open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
        facts = json.loads(stored["about"].tobytes())
        contents = facts.pop("contents")
        contents["wrong"] = {why: (count, name) for why, (count, name) in contents["wrong"].items()}
        if facts == about:
            return ShardIndex(**{key: stored[key] for key in ARRAYS}, contents=Contents(**contents))
    return None


def write(path: Path, about: Mapping[str, Any], index: ShardIndex) -> None:
    """Write an index, unless another process is writing it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    facts = json.dumps({**about, "contents": asdict(index.contents)}).encode()
    with locks.claimed(draft) as file:
        if file is not None:
            np.savez(file, about=np.frombuffer(facts, np.uint8), **{key: getattr(index, key) for key in ARRAYS})
            file.flush()
            os.replace(draft, path)

"""Shards as they were when they were indexed: reading one later gives the same bytes, or raises an error.

Each process opens the shards that it reads, and keeps the last `OPEN` of them open.
"""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
OPEN = 64  # shards that a process holds open


class ShardFile(NamedTuple):
    """A file that holds many images.

    Attributes:
        size: bytes.
        time: of its last change, in nanoseconds since 1970.
    """

    path: bytes
    size: int
    time: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> ShardFile:
        """
        Raises:
            OSError: it is not there.
        """
        facts = os.stat(path)
        return cls(os.path.abspath(os.fsencode(path)), facts.st_size, facts.st_mtime_ns)

    def __str__(self) -> str:
        return os.fsdecode(self.path)

    def read(self, start: int, size: int) -> Bytes:
        """
        Raises:
            OSError: it cannot be read, or has changed.
        """
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
    """
    Raises:
        OSError: it cannot be opened, or has changed.
    """
    file = OpenShard(shard.path)
    if not stat.S_ISREG(file.facts.st_mode):
        raise OSError(f"{shard} is not a file")
    if (file.facts.st_size, file.facts.st_mtime_ns) != (shard.size, shard.time):
        raise OSError(f"{shard} was changed since this run began")
    return file

"""What is known of a shard without its images, found out once and kept in a file beside what is downloaded.

The file is found by the shard's path, and says which size and time the shard had: of one that has changed since, and
of a file that is damaged, the index is made anew. Who is killed while writing leaves a draft, which the next one takes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from trainer.data.downloads import data_folder
from trainer.data.shards.shard_files import ShardFile
from trainer.recipe import DataRecipe
from trainer.saving import locks

VERSION = 1  # counts up when other things are kept
FOLDER = "shards"
ARRAYS = {"names": "uint8", "ends": "int64", "places": "int64", "labels": "int32", "folders": "int32"}
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Contents:
    """What a shard tells beside its images.

    Attributes:
        texts: what it calls its classes.
        told: the names of all classes, where it says so; texts are then their numbers.
        below: folders within it that images lie in.
        hidden, empty, links: files of other programs, images without a byte, members that are links; how many.
        others: how many files are no image that can be read, by suffix.
        wrong: why samples are left out: how many, and the first one's name.
        broken: why it could not be read to its end; empty where it was.
        note: what a run should say of it.
    """

    texts: list[str]
    told: list[str] | None = None
    below: list[str] = field(default_factory=lambda: [""])
    hidden: int = 0
    empty: int = 0
    links: int = 0
    others: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, tuple[int, str]] = field(default_factory=dict)
    broken: str = ""
    note: str = ""


@dataclass(frozen=True)
class ShardIndex:
    """The samples of a shard.

    Attributes:
        names, ends: of all samples, one behind the other, as bytes; and where each one ends.
        places: (samples, 2) int64, how its kind of shard finds a sample's image.
        labels: (samples,) int32, a sample's class as a place in `found.texts`; -1 for none.
        folders: (samples,) int32, places in `found.below`.
    """

    names: Array
    ends: Array
    places: Array
    labels: Array
    folders: Array
    found: Contents

    def __len__(self) -> int:
        return len(self.ends)

    @classmethod
    def of(
        cls,
        names: Iterable[bytes],
        places: Iterable[tuple[int, int]],
        labels: Iterable[int],
        folders: Iterable[int],
        found: Contents,
    ) -> ShardIndex:
        listed = list(names)
        return cls(
            np.frombuffer(b"".join(listed), np.uint8),
            np.cumsum([len(name) for name in listed], dtype=np.int64),
            np.array(list(places), np.int64).reshape(-1, 2),
            np.fromiter(labels, np.int32),
            np.fromiter(folders, np.int32),
            found,
        )


def kept(shard: ShardFile, how: str, make: Callable[[ShardFile], ShardIndex]) -> ShardIndex:
    """A shard's index: the one that is kept, else a new one, which is kept where that can be written.

    Args:
        how: what `make` depends on beside the shard.

    Raises whatever `make` raises.
    """
    path = place_of(shard)
    real = os.fsdecode(os.path.realpath(shard.path))
    about = {"version": VERSION, "how": how, "path": real, "size": shard.size, "time": shard.time}
    there = read(path, about)
    if there is not None:
        return there
    index = make(shard)
    with suppress(OSError):  # a disk that is full, or not ours: it is made again next time
        write(path, about, index)
    return index


def place_of(shard: ShardFile) -> Path:
    """Where a shard's index is kept."""
    key = xxhash.xxh3_64_hexdigest(os.path.realpath(shard.path))
    return data_folder(DataRecipe()) / FOLDER / f"{key}.npz"


def read(path: Path, about: Mapping[str, Any]) -> ShardIndex | None:
    """An index as it was written; None where there is none, or one of something else, or a damaged one."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:  # the archive checks its sums
            said = json.loads(stored["about"].tobytes())
            if {key: said.get(key) for key in about} != dict(about):
                return None
            arrays = {key: stored[key] for key in ARRAYS}
        wrong = {key: (count, name) for key, (count, name) in said["found"].pop("wrong").items()}
        index = ShardIndex(**arrays, found=Contents(**said["found"], wrong=wrong))
    except Exception:  # of what is damaged, reading raises anything at all
        return None
    same = all(arrays[key].dtype == kind for key, kind in ARRAYS.items())
    same &= all(len(arrays[key]) == len(index) for key in ("places", "labels", "folders"))
    return index if same else None


def write(path: Path, about: Mapping[str, Any], index: ShardIndex) -> None:
    """Keep an index, unless another process is writing it.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    said = json.dumps({**about, "found": asdict(index.found)}).encode()
    arrays = {key: getattr(index, key) for key in ARRAYS}
    with locks.claimed(draft) as file:
        if file is not None:
            np.savez(file, about=np.frombuffer(said, np.uint8), **arrays)
            file.flush()
            os.replace(draft, path)

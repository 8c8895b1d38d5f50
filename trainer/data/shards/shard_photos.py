"""The images of one split that lie in shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from trainer.data.encoded import EncodedPhotos

Array = npt.NDArray[Any]


class ShardPhotos(EncodedPhotos):
    """Each by its shard and its place there; none of them has a file of its own."""

    def __init__(
        self, root: Path, names: Iterable[str], labels: Array, begins: Sequence[bytes], shards: Array, places: Array
    ) -> None:
        """
        Args:
            names: paths below `root`, as if a shard were a folder.
            labels: (names, ...) what they show.
            begins: how the addresses of each shard's images begin.
            shards: (names,) places in `begins`.
            places: (names, 2) how the kind of shard finds an image.
        """
        super().__init__(root, names, labels)
        self._begins, self._shards, self._places = tuple(begins), shards, places

    def address(self, index: int) -> bytes:
        first, second = self._places[index].tolist()
        return self._begins[int(self._shards[index])] + b"%016d\0%016d" % (first, second)

    def part(self, rows: Array) -> Self:
        part = super().part(rows)
        part._shards, part._places = self._shards[rows].astype(np.int32), self._places[rows]
        return part

"""Ranks on a grid with named dimensions, as in torch's `DeviceMesh`: the last dimension's ranks are neighbours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Where a rank stands.

    With sizes {"replicas": 2, "stages": 4} rank 5 of 8 is replica 1's stage 1.
    """

    rank: int
    sizes: Mapping[str, int]

    def size(self, dimension: str) -> int:
        return self.sizes.get(dimension, 1)

    def coordinate(self, dimension: str) -> int:
        """This rank's place along a dimension, from 0."""
        return self.rank // self._stride(dimension) % self.size(dimension)

    def ranks(self, dimension: str) -> list[int]:
        """The ranks which differ from this one in that coordinate alone, in its order."""
        stride = self._stride(dimension)
        first = self.rank - self.coordinate(dimension) * stride
        return [first + n * stride for n in range(self.size(dimension))]

    def lines(self, dimension: str) -> list[list[int]]:
        """Every line of ranks along a dimension, in one order for all ranks, in which they make groups."""
        here = [Grid(rank, self.sizes) for rank in range(math.prod(self.sizes.values()))]
        return [grid.ranks(dimension) for grid in here if grid.coordinate(dimension) == 0]

    def _stride(self, dimension: str) -> int:
        """Ranks between neighbours along a dimension."""
        names = [*self.sizes]
        inner = names[names.index(dimension) + 1 :] if dimension in names else names
        return math.prod(self.sizes[name] for name in inner)

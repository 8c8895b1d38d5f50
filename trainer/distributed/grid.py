"""Grids of ranks with named dimensions, as in torch's `DeviceMesh`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Coordinates of a rank on a grid.

    Consecutive ranks differ in the last dimension. With sizes {"replicas": 2, "stages": 4}, rank 5
    of 8 has the coordinates replicas=1 and stages=1.

    Attributes:
        rank: rank whose coordinates are computed.
        sizes: number of ranks along each dimension.
    """

    rank: int
    sizes: Mapping[str, int]

    def size(self, dimension: str) -> int:
        return self.sizes.get(dimension, 1)

    def coordinate(self, dimension: str) -> int:
        """Return the coordinate of the rank along a dimension, counted from 0."""
        return self.rank // self._stride(dimension) % self.size(dimension)

    def ranks(self, dimension: str) -> list[int]:
        """Return the line of ranks through this rank along a dimension, in ascending order.

        Ranks on a line differ only in their coordinate along `dimension`.
        """
        stride = self._stride(dimension)
        first = self.rank - self.coordinate(dimension) * stride
        return [*range(first, first + stride * self.size(dimension), stride)]

    def lines(self, dimension: str) -> list[list[int]]:
        """Return all lines of ranks along a dimension. Each line becomes one process group.

        The result is the same on every rank, because all ranks must create all process groups in
        the same order.
        """
        lines = []
        for rank in range(math.prod(self.sizes.values())):
            grid = Grid(rank, self.sizes)
            if grid.coordinate(dimension) == 0:
                lines.append(grid.ranks(dimension))
        return lines

    def _stride(self, dimension: str) -> int:
        """Return the difference of two ranks whose coordinates along a dimension differ by 1."""
        stride = 1
        for name, size in self.sizes.items():
            stride *= size
            if name == dimension:
                # Only the sizes of the dimensions after this one are multiplied.
                stride = 1
        return stride

"""Functions of whole matrices whose rows are divided over ranks, for optimizers such as Muon."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from trainer.distributed.world import World


class MatrixExchange:
    """Gathers each matrix on one rank, which computes a function of it and returns the rows.

    The ranks share the work, and none of them needs memory for all whole matrices. Each call sends
    the values of all matrices in one message per pair of ranks, and the results in another.
    """

    def __init__(self, world: World, heights: Mapping[nn.Parameter, int]) -> None:
        """Store how the matrices are divided.

        Args:
            world: the ranks. The rows of each matrix are divided over a line of ranks along
                `shards`, as by `torch.chunk`.
            heights: number of rows of the whole matrix, by the parameter with this rank's rows.
        """
        self._world = world
        self._heights = heights
        self._ranks = range(world.grid.size("shards"))
        self._own = world.grid.coordinate("shards")

    def count_rows(self, parameter: nn.Parameter) -> int:
        """Return the number of rows of a whole matrix."""
        return self._heights[parameter]

    def compute(
        self,
        rows: Mapping[nn.Parameter, Tensor],
        function: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    ) -> dict[nn.Parameter, Tensor]:
        """Compute a function of whole matrices, and return this rank's rows of the results.

        Collective. All ranks must pass the same parameters in the same order.

        Args:
            rows: this rank's rows of each matrix, (rows, columns), bfloat16.
            function: returns a matrix of the same shape and type for each matrix.
        """
        owned = self._choose_owners(rows)
        own_matrices = owned[self._own]
        parts = [[rows[parameter] for parameter in matrices] for matrices in owned]
        shapes = [
            [[self._count(p, rank), rows[p].shape[1]] for p in own_matrices] for rank in self._ranks
        ]
        gathered = self._exchange(parts, shapes)
        results = function([torch.cat(pieces) for pieces in zip(*gathered, strict=True)])
        parts = [[] for _ in self._ranks]
        for parameter, result in zip(own_matrices, results, strict=True):
            counts = [self._count(parameter, rank) for rank in self._ranks]
            for rank, piece in enumerate(torch.split(result, counts)):
                parts[rank].append(piece)
        own_shapes = [[rows[parameter].shape for parameter in matrices] for matrices in owned]
        own_rows = {}
        for matrices, pieces in zip(owned, self._exchange(parts, own_shapes), strict=True):
            for parameter, piece in zip(matrices, pieces, strict=True):
                own_rows[parameter] = piece.to(rows[parameter].device)
        return own_rows

    def _choose_owners(self, rows: Mapping[nn.Parameter, Tensor]) -> list[list[nn.Parameter]]:
        """Return the matrices that each rank gathers, so that all ranks have similar work."""
        costs = {}
        for parameter, part in rows.items():
            height = self._heights[parameter]
            width = part.shape[1]
            # Multiplying a matrix by its transpose takes this number of multiplications.
            costs[parameter] = height * width * min(height, width)
        owned: list[list[nn.Parameter]] = [[] for _ in self._ranks]
        loads = [0 for _ in self._ranks]
        for parameter in sorted(costs, key=lambda parameter: -costs[parameter]):
            owner = loads.index(min(loads))
            owned[owner].append(parameter)
            loads[owner] += costs[parameter]
        return owned

    def _count(self, parameter: nn.Parameter, rank: int) -> int:
        """Return the number of rows of a matrix that a rank has."""
        height = self._heights[parameter]
        most = -(-height // len(self._ranks))
        return max(0, min(most, height - rank * most))

    def _exchange(
        self, parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[Tensor]]:
        """Send `parts[rank]` to each rank, and return what each rank has sent. Collective.

        Args:
            parts: matrices to send, by rank.
            shapes: shapes of the matrices to receive, by rank.
        """
        device = self._world.device
        blocks = [block.flatten() for part in parts for block in part]
        if not blocks:
            # A rank without matrices sends nothing, but takes part.
            blocks = [torch.empty(0, dtype=torch.bfloat16)]
        # With fsdp.offload, the rows are in host memory.
        sent = torch.cat(blocks).to(device)
        sizes = [sum(map(Tensor.numel, part)) for part in parts]
        counts = [sum(map(math.prod, part)) for part in shapes]
        received = torch.split(self._world.exchange(sent, sizes, counts, "shards"), counts)
        pieces = []
        for values, part in zip(received, shapes, strict=True):
            split = torch.split(values, [math.prod(shape) for shape in part])
            pieces.append([piece.view(shape) for piece, shape in zip(split, part, strict=True)])
        return pieces

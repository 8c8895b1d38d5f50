"""Ranks as threads of one process, for what a mode exchanges; gloo itself is met in tests of whole runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import torch

from tests.simulated.nccl_order import Network
from trainer.processes import world
from trainer.processes.rank import Place
from trainer.saving.tensor_files import Piece, StoredTensor


class CountingWorld(world.World):
    """Knows how many tensors it has sent."""

    sent = 0

    def broadcast_(self, values, along=None):
        self.sent += 1
        return super().broadcast_(values, along)


def gathered(strategy, named):
    """The whole model's tensors on rank 0, of what each rank adds to them; empty elsewhere."""
    pieces, world = strategy.pieces(named), strategy.world
    places = world.gather({name: (piece.shape, piece.start) for name, piece in pieces.items()})
    parts = world.gather_tensors({name: piece.local for name, piece in pieces.items()})
    found = {}
    for place, part in zip(places, parts, strict=True):
        for name, local in part.items():
            found.setdefault(name, []).append(Piece(local, *place[name]))
    return {name: StoredTensor(pieces).read().clone() for name, pieces in found.items()}


def on_ranks(size, work):
    """What `work(world)` returns on each of `size` ranks, in rank order."""
    network = Network(size)
    dist = SimpleNamespace(**network.names(), ReduceOp=torch.distributed.ReduceOp)

    def rank(number):
        network.enter(number)
        return work(CountingWorld(Place(number, size, number, size, 0, True), torch.device("cpu"), 1, ()))

    with mock.patch.object(world, "lost_peers", lambda *_: nullcontext(dist)), ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))

"""Ranks as threads of one process, for what a mode exchanges; gloo itself is met in tests of whole runs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from trainer.processes.rank import Place
from trainer.processes.world import World
from trainer.saving.tensor_files import Piece, StoredTensor


class ThreadWorld(World):
    """A rank that meets the others at a `threading.Barrier`."""

    def meet(self, value):
        self.slots[self.rank] = value
        self.gate.wait()
        values = list(self.slots)
        self.gate.wait()
        return values

    def sum_(self, values, along=None):
        return values.copy_(sum(self.meet(values.clone())))

    def max_(self, values):
        return values.copy_(torch.stack(self.meet(values.clone())).amax(0))

    def broadcast_(self, values, along=None):
        self.sent += 1
        return values.copy_(self.meet(values.clone())[0])

    def gather(self, value):
        values = self.meet(value)
        return values if self.is_main else []

    def gather_tensors(self, named):
        return self.gather({name: tensor.detach().clone() for name, tensor in named.items()})

    def broadcast_object(self, value):
        return self.meet(value)[0]

    def barrier(self):
        self.gate.wait()


def gathered(strategy, named):
    """The whole model's tensors on rank 0, of what each rank adds to them; empty elsewhere."""
    pieces, world = strategy.pieces(named), strategy.world
    places = world.gather({name: (piece.shape, piece.start) for name, piece in pieces.items()})
    parts = world.gather_tensors({name: piece.local for name, piece in pieces.items()})
    found = {}
    for place, part in zip(places, parts, strict=True):
        for name, local in part.items():
            found.setdefault(name, []).append(Piece(local, *place[name]))
    return {name: StoredTensor(pieces).read() for name, pieces in found.items()}


def on_ranks(size, work):
    """What `work(world)` returns on each of `size` ranks, in rank order."""
    gate, slots = threading.Barrier(size, timeout=30), [None] * size
    worlds = [ThreadWorld(Place(rank, size, rank, size, 0, True), torch.device("cpu"), 1, ()) for rank in range(size)]
    for world in worlds:
        world.gate, world.slots, world.sent = gate, slots, 0
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, worlds))

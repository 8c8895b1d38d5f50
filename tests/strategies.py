"""Ranks as threads of one process, for what a mode exchanges; gloo itself is met in tests of whole
runs.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from torch.nn.functional import cross_entropy

from tests.simulated.nccl_order import Network
from trainer import tasks
from trainer.data import Batch, Example, TensorSpec
from trainer.distributed import world
from trainer.distributed.world import World
from trainer.modes import Context, create
from trainer.processes.rank import Place
from trainer.recipe import load
from trainer.saving.tensor_files import Shard, StoredTensor


class CountingWorld(world.World):
    """A world that counts the tensors that it sends."""

    sent = 0

    def broadcast_(self, values, along=None):
        self.sent += 1
        return super().broadcast_(values, along)


def gathered(strategy, named):
    """The whole model's tensors on rank 0, of what each rank adds to them; empty elsewhere."""
    pieces = strategy.pieces(named)
    world = strategy.world
    places = world.gather({name: (piece.shape, piece.start) for name, piece in pieces.items()})
    parts = world.gather_tensors({name: piece.local for name, piece in pieces.items()})
    collected = {}
    for place, part in zip(places, parts, strict=True):
        for name, local in part.items():
            collected.setdefault(name, []).append(Shard(local, *place[name]))
    return {name: StoredTensor(pieces).read().clone() for name, pieces in collected.items()}


def on_ranks(size, work):
    """Return the results of `work(world)` on `size` ranks, in rank order."""
    network = Network(size)
    dist = SimpleNamespace(**network.names(), ReduceOp=torch.distributed.ReduceOp)

    def rank(number):
        network.enter(number)
        return work(
            CountingWorld(
                Place(number, size, number, size, 0, True),
                torch.device("cpu"),
                1,
                (),
            )
        )

    with (
        mock.patch.object(world, "translate_peer_errors", lambda *_: nullcontext(dist)),
        ThreadPoolExecutor(size) as pool,
    ):
        return list(pool.map(rank, range(size)))


def context(recipe, world, shape, classes=10, dtype=torch.float32, **more):
    """Return the context of a mode for micro-batches of inputs (N, ...)."""
    rows, *inside = shape
    example = Example(rows, TensorSpec(tuple(inside), dtype))
    return Context(
        recipe,
        world,
        tasks.create_task(recipe, tuple(map(str, range(classes)))),
        example,
        **more,
    )


def create_strategy(recipe, world, shape, **more):
    """The recipe's mode, without a model yet."""
    return create(context(recipe, world, shape, **more))


CPU = torch.device("cpu")


ROWS = 10


def staged(
    model,
    drives,
    words,
    shape=(ROWS, 1, 8, 8),
    **more,
):
    """A copy of the model under a mode, on devices."""
    world = World(
        Place(),
        drives[0],
        1,
        tuple(map(str, drives)),
        drives,
    )
    defaults = {"mode": "pipeline", "batch_size": shape[0], "channels_last": False}
    strategy = create_strategy(load(defaults, *words.split()), world, shape, **more)
    strategy.setup(copy.deepcopy(model))
    return strategy


def digits(rows=ROWS, device=CPU, number=0):
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(rows, 1, 8, 8, generator=generator)
    return Batch(
        images.to(device),
        torch.randint(10, (rows,), generator=generator).to(device),
        rows,
    )


def gradients(named):
    return {name: parameter.grad.cpu() for name, parameter in named}


def assert_equals_whole(model, strategy, batch, tolerance=1e-5):
    """Loss, gradients and outputs in evaluation mode are the whole model's."""
    whole = copy.deepcopy(model).to(batch.inputs.device)
    expected = cross_entropy(whole(batch.inputs), batch.targets)
    expected.backward()
    strategy.train(model.training)
    loss = strategy.forward_backward(batch, 1 / batch.count)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(loss, expected.detach(), **close)
    actual_gradients = gradients(strategy.named_parameters().items())
    torch.testing.assert_close(actual_gradients, gradients(whole.named_parameters()), **close)
    strategy.train(False)
    with torch.no_grad():
        torch.testing.assert_close(
            strategy.forward(batch.inputs), whole.eval()(batch.inputs), **close
        )

"""A mode whose ranks hold parts of tensors: what each writes into a checkpoint comes back by `scatter`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.contexts import context
from tests.saving.states import refuse
from tests.worlds import on_ranks
from trainer.modes import Strategy
from trainer.modes.base import Piece
from trainer.optim.optimization import MovingAverage
from trainer.optim.optimizers import build_optimizer, optimizer_state
from trainer.processes.grid import Grid
from trainer.recipe import load
from trainer.saving.checkpoint import Position, State, begin, newest, seal, write_files
from trainer.saving.checkpoint_broadcast import on_every_rank


class Sharded(Strategy):
    """Each rank owns as many rows of every matrix as the others, and the first rank all the rest."""

    def setup(self, model):
        self.world.grid = Grid(self.world.rank, {"replicas": 1, "shards": self.world.size})
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.local = {}
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                self.local[name] = nn.Parameter(self.part(parameter.detach()).clone())
            elif self.world.is_main:
                self.local[name] = parameter

    def part(self, tensor):
        return tensor.tensor_split(self.world.size)[self.world.rank]

    def named_parameters(self):
        return self.local

    def layout(self, named):
        return {name: self.piece(name.partition("//")[0], tensor) for name, tensor in named.items()}

    def piece(self, parameter, tensor):
        if tensor.dim() < 2:
            return Piece(tensor, tensor.shape)
        rows = self.part(torch.arange(self.shapes[parameter][0]))
        return Piece(tensor, self.shapes[parameter], int(rows[0]) if len(rows) else 0)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_of_tensors_are_saved_whole_and_come_back(size, optimizer, tmp_path):
    recipe = load(None, f"optimizer.name={optimizer}")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 3))

    def start(world, seed):
        strategy = Sharded(context(recipe, world, (2, 4)))
        strategy.setup(model)
        optimizer = build_optimizer(strategy.named_parameters(), recipe.optimizer)
        state = optimizer_state(optimizer, strategy.named_parameters())
        generator = torch.Generator().manual_seed(10 * seed + world.rank)
        for tensor in state.values():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) if tensor.dim() else torch.tensor(float(seed)))
        average = MovingAverage(strategy.named_parameters(), 0.9)
        return strategy, state, average.average

    def save(world):
        strategy, state, average = start(world, seed=1)
        parts = {"optimizer": strategy.pieces(state), "ema": strategy.pieces(average)}
        pieces = {f"{part}-{world.rank:05d}": pieces for part, pieces in parts.items() if pieces}
        part = State(Position(1, 0, 1), {}, {"rank": world.rank}, pieces)
        draft = world.broadcast_object(begin(tmp_path, 1) if world.is_main else None)
        files = world.gather(write_files(draft, part))
        if world.is_main:
            seal(draft, part, {name: file for written in files for name, file in written.items()}, lambda: None)
        return {name: tensor.clone() for name, tensor in state.items()}

    def resume(world):
        strategy, state, average = start(world, seed=2)
        for tensor in average.values():
            tensor.detach().zero_()
        saved = on_every_rank(newest(tmp_path, refuse) if world.is_main else None, world)
        strategy.scatter(saved.part("optimizer"), state)
        strategy.scatter(saved.part("ema"), average)
        return state, average, dict(strategy.named_parameters())

    before, after = on_ranks(size, save), on_ranks(size, resume)
    whole = newest(tmp_path, refuse).state
    assert {name: tuple(tensor.shape) for name, tensor in whole.part("ema").items()} == {
        name: tuple(tensor.shape) for name, tensor in model.named_parameters()
    }
    for saved, (state, average, weights) in zip(before, after, strict=True):
        assert saved.keys() == state.keys() and all(torch.equal(saved[name], state[name]) for name in saved)
        assert all(torch.equal(average[name], weights[name]) for name in weights)

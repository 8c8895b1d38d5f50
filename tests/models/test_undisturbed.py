"""A measurement leaves no trace in a model, whatever its forward changes."""

import random

import numpy as np
import torch
from torch import nn

from trainer.models.undisturbed import undisturbed

CPU = torch.device("cpu")


class Changing(nn.Module):
    """A forward that changes one of each kind of thing."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=None)
        self.count, self.last, self.seen, self.names, self.state = 0, None, [], {}, torch.zeros(3)
        self.array, self.nested = np.zeros(3), {"n": 0, "arrays": [np.zeros(2)], "tensors": (torch.zeros(2),)}
        self.mask, self.system = torch.zeros(1, 4).expand(4, 4), random.SystemRandom()
        with torch.inference_mode():
            self.inferred = torch.zeros(2)
        self.mine, self.torchs = np.random.default_rng(0), torch.Generator().manual_seed(0)
        self.old, self.pythons = np.random.RandomState(0), random.Random(0)

    def draws(self):
        own = [self.mine.random(), torch.rand((), generator=self.torchs).item(), self.old.rand(), self.pythons.random()]
        return [*own, random.random(), np.random.rand(), torch.rand(()).item()]

    def forward(self, x):
        self.count += 1
        self.last, self.norm.momentum = x, 1.0
        self.seen.append(1)
        self.names["a"] = 1
        self.state += 1
        self.array += 1
        self.nested["n"] += 1
        self.nested["arrays"][0] += 1
        self.nested["tensors"][0].add_(1)
        self.made = getattr(self, "made", 0) + 1
        self.train(not self.training)
        self.draws()
        return self.norm(x)


def described(model):
    plain = model.count, model.last, model.seen, model.names, model.state.tolist(), model.training, model.norm.momentum
    plain = *plain, model.array.tolist(), repr(model.nested), hasattr(model, "made")
    return str(plain), {name: buffer.tolist() for name, buffer in model.named_buffers()}


def test_nothing_that_a_forward_changes_is_left():
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    expected = Changing().draws()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    model = Changing()
    before = described(model)
    with undisturbed([model], CPU):
        for _ in range(2):
            model(torch.randn(4, 3))
        assert described(model) != before
    assert described(model) == before
    assert model.draws() == expected

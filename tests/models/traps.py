"""Small models with one trap each, for tests of graphs and of where they can be cut."""

import torch
from torch import nn

from trainer.models.partition import trace


class Two(nn.Module):
    """Two layers with something between them, given as a function of (model, value, input)."""

    def __init__(self, between, inplace=False):
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 4), nn.ReLU(inplace), nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))
        self.between = between

    def forward(self, x):
        return self.second(self.between(self, self.first(x), x))


def check(model, size=4):
    """All stages in a row, on leaves that require grad, in both modes and at two batch sizes; sent tensors stay."""
    traced = trace(model)
    for training in (True, False):
        for batch in (2, 3):
            received = inputs = torch.randn(batch, size)
            torch.manual_seed(2)
            sent = []
            for stage in traced.stages(traced.cuts):
                out = stage.train(training)(received)
                sent.append((received, received.detach().clone()))
                received = out.detach().requires_grad_()
            assert all(torch.equal(now, then) for now, then in sent[1:])
            torch.manual_seed(2)
            torch.testing.assert_close(out, model.train(training)(inputs))

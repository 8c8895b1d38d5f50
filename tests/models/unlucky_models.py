"""A plugin: models with a layer that fails in a certain way, to test the message for the user."""

from functools import partial

import torch
from torch import nn

from trainer import register_model


class Scattered(nn.Module):
    """Copies its input by an operation that has no deterministic kernel on any device."""

    def forward(self, x):
        places = torch.arange(x.numel(), device=x.device)
        return torch.zeros_like(x).put_(places, x.detach()) + x


class Greedy(nn.Module):
    """A layer that needs more memory than available if it trains on more than 2 images."""

    def forward(self, x):
        return x * greedy(x)


def greedy(x):
    if torch.is_grad_enabled() and x.requires_grad and len(x) > 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB")
    return 1


torch.fx.wrap("greedy")


def chain(layer, classes, channels, size):
    rows = channels * size * size
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(rows, 8),
        layer,
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, classes),
    )


for kind in (Scattered, Greedy):
    register_model(kind.__name__.lower())(partial(chain, kind()))


class Renormalised(nn.BatchNorm2d):
    """Reads in training what it has learned so far."""

    def forward(self, inputs):
        return super().forward(inputs) * self.running_var.rsqrt().view(1, -1, 1, 1)


@register_model("renormalised")
def renormalised(classes, channels, size):
    layers = [
        nn.Conv2d(channels, 4, 1),
        Renormalised(4),
        nn.Conv2d(4, 4, 1),
        nn.ReLU(),
        nn.Flatten(),
    ]
    return nn.Sequential(*layers, nn.Linear(4 * size * size, classes))

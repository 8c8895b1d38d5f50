"""A plugin for simulated cards: a model whose pass needs much memory, and one whose pass needs
little.
"""

from torch import nn

import tests.simulated.simcuda.plugin  # noqa: F401
from trainer import register_model


@register_model("wide")
def wide(classes, channels, size):
    layers = (
        nn.Conv2d(channels, 96, 3, padding=1),
        nn.Conv2d(96, 96, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
    )
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96, classes))


@register_model("linear")
def linear(classes, channels, size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size**2, classes))

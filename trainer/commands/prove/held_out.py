"""A data set that tells whether every held-out image is counted once: image n has the number n to tell.

The network answers nought, so that the mean error is the mean of the numbers, and the squares tell which were missed
and counted twice instead. Runs of `prove` name this module as their plugin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer import register_dataset, register_model
from trainer.recipe import DataRecipe

NAME, COUNT, TRAINING = "numbered", 83, 4096  # a prime: no number of shards divides it


@register_dataset(NAME)
def numbered(data: DataRecipe) -> Any:
    """(train, val, names)."""

    def part(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(count, 1, 4, 4, dtype=torch.uint8), torch.arange(1.0, count + 1)[:, None]

    return part(TRAINING), part(COUNT), ["number"]


@register_model("nought")
def nought(num_classes: int, channels: int, image_size: int) -> nn.Module:
    """Layers enough to be cut in two, the last of which gives zeros."""
    last = nn.Linear(4, num_classes)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels * image_size**2, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), last
    )

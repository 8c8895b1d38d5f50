"""A plugin of `prove`'s runs that shows whether every held-out image is counted once: image n has the target n.

The model answers 0, so that the mean error is the mean of the numbers, and the squares show which were missed and
counted twice instead.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from trainer.data import register_dataset
from trainer.models.zoo import register_model
from trainer.recipe import DataRecipe
from trainer.recipe.image_sizes import ImageSize, sides

NAME, COUNT, TRAINING = "numbered", 83, 4096  # a prime: no number of shards divides it


@register_dataset(NAME)
def numbered(data: DataRecipe) -> Any:
    """(train, val, names)."""

    def part(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(count, 1, 4, 4, dtype=torch.uint8), torch.arange(1.0, count + 1)[:, None]

    return part(TRAINING), part(COUNT), ["number"]


@register_model("zeros")
def zeros(num_classes: int, channels: int, image_size: ImageSize) -> nn.Module:
    """Layers enough to be cut in two, the last of which gives zeros."""
    last = nn.Linear(4, num_classes)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    first = nn.Linear(channels * math.prod(sides(image_size)), 4)
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), last)

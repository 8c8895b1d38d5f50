"""The context of a mode: values for its constructor, and methods that depend on these alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data import DataShare, Example
from trainer.devices.precision import autocast
from trainer.distributed.world import World
from trainer.recipe import Recipe
from trainer.tasks import Task


@dataclass(frozen=True)
class Context:
    """Recipe, world, task and shape of the data of a run, for the constructor of the run's mode."""

    recipe: Recipe
    # World of this rank.
    world: World
    # Task whose loss is minimized.
    task: Task
    # Shape and type of a micro-batch on this rank.
    example: Example
    # Number of samples of an epoch, summed over all ranks.
    samples: int = 0
    # Part of every global batch that this rank reads; None selects the result of
    # `Strategy.data_share`.
    share: DataShare | None = None
    # Function that multiplies a loss by the loss scale of fp16, called before the backward pass. In
    # other precisions it returns the loss itself.
    scale: Callable[[Tensor], Tensor] = lambda loss: loss
    # Earlier measurements (`Strategy.tuned`) that determine how the mode runs.
    tuned: Mapping[str, Any] = field(default_factory=dict)
    # Function that prints a message on rank 0.
    say: Callable[[str], None] = lambda message: None
    # Number of leading blocks that recompute=true recomputes; None means all of them.
    recomputed: int | None = None

    def place(
        self,
        model: nn.Module,
        device: torch.device,
    ) -> nn.Module:
        """Move `model` to `device`, in the recipe's memory format."""
        layout = torch.channels_last if self.recipe.channels_last else torch.contiguous_format
        placed: nn.Module = model.to(device, memory_format=layout)  # type: ignore[call-overload]
        return placed

    def sample(self, rows: int | None = None, evaluated: bool = False) -> Tensor:
        """Create random inputs on this rank's device, for measurements and comparisons.

        Args:
            rows: number of inputs, by default that of a micro-batch.
            evaluated: whether the inputs have the shape of those in evaluation.
        """
        example = self.example
        if evaluated and example.evaluated:
            example = replace(example, inputs=example.evaluated)
        channels_last = self.recipe.channels_last
        return example.batch(self.world.device, rows or example.rows, channels_last).inputs

    def in_precision(
        self,
        module: nn.Module,
        inputs: Tensor,
    ) -> Tensor:
        """Run a forward pass of `module`, under autocast if the recipe's precision needs it."""
        with autocast(self.world.device, self.recipe.precision):
            out: Tensor = module(inputs)
        return out

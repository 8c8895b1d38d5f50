"""Measurements and reports of a mode: times, the timeline, and lines of the banner.

The banner is what a run prints before it trains. The defaults are right for a mode without
communication.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from trainer.distributed.world import World
from trainer.modes.context import Context
from trainer.modes.pipeline.orders import Span
from trainer.telemetry.clocks import StepTimer, Stopwatch, synchronise


class Communication(NamedTuple):
    """Time that communication adds to a step.

    Attributes:
        seconds: added time of a step in seconds.
        at_most: True if `seconds` is an upper bound, because computation may hide some
            communication; False if `seconds` is the added time itself.
    """

    seconds: float
    at_most: bool = False


class Measures:
    """Measurements of a mode, for the banner, result.json, TensorBoard and `telemetry.verdict`."""

    world: World
    device: torch.device

    def __init__(self, context: Context) -> None:
        recipe = context.recipe
        # This stopwatch measures computation that does not wait for other ranks: a forward pass, or
        # the forward pass of a block if weights are sharded. The attribute is None with a single
        # rank, and if the times of the ranks cannot be compared: all ranks must do the same work,
        # on local batches whose sizes are equal or set by the recipe's `shares`.
        self.forward_watch: Stopwatch | None = None
        microbatches = context.world.size * recipe.pieces * recipe.augment.together
        is_divisible = recipe.batch_size % microbatches == 0
        is_comparable = is_divisible or recipe.shares is not None
        if recipe.traits.alike and context.world.size > 1 and is_comparable:
            device = context.world.device
            every = StepTimer.MARKED if device.type == "cuda" else 1
            self.forward_watch = Stopwatch(device, every)
        # This stopwatch measures exchanges between replicas that no computation hides.
        self.averaging = Stopwatch(context.world.device)
        # `step_graphs` sets this to True because it measures whole passes itself, except those in
        # which ranks exchange gradients.
        self.is_timed_by_graphs = False
        # Description of the blocks whose activations are recomputed, for reports; None if no block
        # recomputes.
        self.recompute_description: str | None = None

    def watched_forward(self) -> AbstractContextManager[None]:
        """Return a context that measures the time of a forward pass in training."""
        if self.is_timed_by_graphs:
            return nullcontext()
        return self.forward_watch or nullcontext()

    def notes(self) -> dict[str, str]:
        """Return lines for the banner, by title."""
        return {}

    def result_fields(self) -> dict[str, Any]:
        """Return additional keys of result.json with their values."""
        return {}

    def figures(self) -> dict[str, float]:
        """Return TensorBoard values for the steps since the last call, by tag. Collective."""
        return {}

    def timeline(self) -> list[list[Span]]:
        """Return the spans of the steps that the last call of `figures` measured. Collective.

        Returns:
            The spans of each step on rank 0; an empty list on other ranks and without stages.
        """
        return []

    def communication(
        self,
        steps: int,
        step_seconds: float,
        budget: float,
    ) -> Communication:
        """Measure the time that communication adds to a step. Collective.

        This runs after the last step. Weights, buffers and random states must not change.

        Args:
            steps: number of steps that this process trained.
            step_seconds: duration of a step in seconds.
            budget: maximum duration of the measurement in seconds.
        """
        return Communication(self.averaging.seconds() / max(1, steps))

    def all_reduce_seconds(
        self,
        size: int,
        budget: float,
    ) -> float:
        """Measure the duration in seconds of an all-reduce. Collective.

        Args:
            size: number of bytes on each rank; equal on all ranks.
            budget: maximum duration of the measurement in seconds.
        """
        message = torch.zeros(size // 4, device=self.device)
        synchronise([self.device])
        seconds = 0.0
        # The first all-reduce also connects the ranks and allocates memory. Its time is returned
        # only if the budget is too short for a second one.
        for _ in range(2):
            if seconds > budget / 2:
                break
            self.world.barrier()
            start = time.perf_counter()
            self.world.sum_(message)
            synchronise([self.device])
            seconds = self.average_over_ranks(time.perf_counter() - start)
        return seconds

    def average_over_ranks(self, seconds: float) -> float:
        """Return the mean of `seconds` over all ranks. Collective."""
        total = self.world.sum_(torch.tensor(seconds, device=self.device))
        return total.item() / self.world.size

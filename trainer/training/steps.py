"""Computation of training steps by kernels that Python launches one by one.

A CPU needs nothing else. If the device has CUDA graphs and the recipe allows them, a run uses
`step_graphs.GraphSteps`, which replays captured kernels instead.
"""

from torch import Tensor

from trainer.data import Batch
from trainer.devices import cuda_graphs
from trainer.modes.base import Strategy
from trainer.optim.optimization import Updater
from trainer.optim.optimizers import LearningRates


class EagerSteps:
    """Training steps on the device, as the training loop computes them.

    The loop calls `check` at the start of an epoch. In each step it calls `begin`, then
    `forward_backward` for each micro-batch, then `update`.
    """

    def __init__(self, strategy: Strategy, updater: Updater) -> None:
        self.strategy = strategy
        self.updater = updater
        self._set_rates()

    def _set_rates(self) -> None:
        self.rates = LearningRates(self.updater.optimizer)

    def check(self) -> None:
        """Read the optimizer's groups again if it was built again because more weights train."""
        if self.rates.groups is not self.updater.optimizer.param_groups:
            self._set_rates()

    def begin(self, lr: float) -> None:
        """Begin a step with learning rate `lr`."""
        self.rates.set(lr)

    def forward_backward(self, batch: Batch, weight: float, sync: bool) -> Tensor:
        """Compute a micro-batch as `Strategy.forward_backward` does."""
        return self.strategy.forward_backward(batch, weight, sync)

    def update(self, loss: Tensor, want_norm: bool) -> Tensor | None:
        """Update the weights from reduced gradients.

        Returns:
            The gradient's norm before clipping, if it is clipped or `want_norm`.
        """
        norm = self.updater.step(loss, self.strategy, want_norm)
        self.updater.zero_grad()
        return norm

    # `GraphSteps` overrides the following methods and properties.

    @property
    def should_capture(self) -> bool:
        """Whether the loop should call `capture` before the next step."""
        return False

    def capture(self) -> None:
        raise NotImplementedError

    def forget(self) -> None:
        """Drop the captured step: micro-batches have other shapes, or other parameters train."""

    @property
    def has_captured(self) -> bool:
        """Whether CUDA graphs of the step exist. They access gradients at fixed addresses."""
        return False

    @property
    def kind(self) -> str | None:
        """How steps are computed: "launched" or "replayed". None if the device has no graphs."""
        return "launched" if cuda_graphs.has_cuda_graphs(self.strategy.device) else None

    @property
    def might_be_faster(self) -> bool:
        """Whether the steps are eager, but CUDA graphs might be possible and were not tried."""
        return self.kind is not None

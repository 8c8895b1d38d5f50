"""Training steps whose kernels Python launches one by one.

If the device supports CUDA graphs and the recipe allows them, a run uses `step_graphs.GraphSteps`
instead, which replays captured kernels. A CPU does not support CUDA graphs.
"""

from torch import Tensor

from trainer.data import Batch
from trainer.devices import cuda_graphs
from trainer.modes.base import Strategy
from trainer.optim.optimization import Updater
from trainer.optim.optimizers import LearningRates


class EagerSteps:
    """Training steps without CUDA graphs.

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
        """Use the groups of a new optimizer, if the updater has built one.

        The updater does so when the set of trained parameters changes, and when a run is resumed.
        """
        if self.rates.groups is not self.updater.optimizer.param_groups:
            self._set_rates()

    def begin(self, lr: float) -> None:
        """Begin a step with learning rate `lr`."""
        self.rates.set(lr)

    def forward_backward(self, batch: Batch, weight: float, sync: bool) -> Tensor:
        """Compute a micro-batch as `Strategy.forward_backward` does."""
        return self.launch(batch, weight, sync)

    def launch(self, batch: Batch, weight: float, sync: bool) -> Tensor:
        """Compute a micro-batch kernel by kernel, even if its pass was captured."""
        return self.strategy.forward_backward(batch, weight, sync)

    def update(self, loss: Tensor, want_norm: bool) -> Tensor | None:
        """Update the weights with the gradients, which must already be summed over the ranks.

        Args:
            loss: Loss of this step, 0-dim.
            want_norm: Whether to compute the norm even if the recipe does not clip gradients.

        Returns:
            The norm of the gradient before clipping, 0-dim, or None if it was not computed.
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
        """Drop the captured step, because other micro-batch shapes or other parameters follow."""

    def close(self) -> None:
        """Release all CUDA graphs. NCCL waits for them before it leaves a process group."""

    @property
    def kind(self) -> str | None:
        """How steps are computed: "launched" (kernel by kernel) or "replayed" (as a CUDA graph).

        None if the device has no CUDA graphs. Graphs access gradients at fixed addresses.
        """
        return "launched" if cuda_graphs.has_cuda_graphs(self.strategy.device) else None

    @property
    def might_be_faster(self) -> bool:
        """Whether the steps are eager, but CUDA graphs might be possible and were not tried."""
        return self.kind is not None

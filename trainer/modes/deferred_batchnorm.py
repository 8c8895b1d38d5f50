"""BatchNorm in a pipeline: running statistics are updated once per mini-batch.

Each micro-batch is still normalized by its own mean and variance. Only the running statistics,
which evaluation uses, are deferred to the end of the mini-batch, so that they are those of the
whole mini-batch. The idea is torchgpipe's (Kim et al., arXiv:2004.09910, section 3.3).

The layers are not replaced. During a mini-batch they have momentum 1, so that their buffers contain
the statistics of the latest micro-batch. The statistics are copied after each forward pass of a
stage, for all of its layers at once and outside of compiled code, and combined at the end of the
mini-batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data import Example
from trainer.errors import RecipeError
from trainer.models.norms import (
    count_values_per_row,
    list_statistics_layers,
    select_unlike_batch_norm,
)
from trainer.modes.flattening import unflatten_into


def find_deferrable(
    model: nn.Module,
    example: Example,
    remedy: str,
) -> dict[nn.Module, int]:
    """Find the layers whose statistics can be deferred.

    Args:
        model: the whole model, on the CPU.
        example: shape of the model's inputs.
        remedy: end of the error message, with the arguments to type instead.

    Returns:
        Number of values per channel in one sample, by layer.

    Raises:
        RecipeError: the statistics of some layer cannot be deferred.
    """
    layers = list_statistics_layers(model)
    if not layers:
        return {}
    seen = count_values_per_row(model, example.batch(torch.device("cpu"), 2).inputs, layers)
    reasons = dict.fromkeys(
        select_unlike_batch_norm(layers), "updates its statistics in a way of its own"
    )
    for name, calls in seen.items():
        if len(calls) > 1:
            reasons[name] = f"is called {len(calls)} times in a forward pass"
    for name, reason in reasons.items():
        raise RecipeError(
            f"layer {name or 'the model itself'} ({type(layers[name]).__name__}) {reason}, so "
            "the statistics of a whole batch cannot be computed from its micro-batches: "
            f"{remedy}"
        )
    # Layers that are never called are left out, because they have no statistics.
    return {layer: seen[name][0] for name, layer in layers.items() if seen[name]}


class DeferredStatistics:
    """Running statistics of a stage's layers during one mini-batch."""

    def __init__(
        self,
        stage: nn.Module,
        values: dict[nn.Module, int],
    ) -> None:
        """Find the layers of `stage` whose statistics are deferred.

        Args:
            stage: a stage of the model.
            values: the result of `find_deferrable`.
        """
        self.layers: list[Any] = [layer for layer in stage.modules() if layer in values]
        self._values = values
        self._momenta: list[float | None] = []
        # Number of samples, and mean and unbiased variance of all layers, for each micro-batch.
        self._parts: list[tuple[int, Tensor, Tensor]] = []
        # Running mean, running variance and batch counters before the mini-batch.
        self._before: tuple[Tensor, Tensor, list[Tensor]]
        # 1 / number of values in one sample, for each channel.
        self._rows_per_value: Tensor | None = None

    def begin(self) -> None:
        """Prepare the layers for the forward pass of a micro-batch."""
        if self._momenta:
            # The first micro-batch of this mini-batch has already prepared the layers.
            return
        self.layers = [layer for layer in self.layers if layer.training]
        if not self.layers:
            return
        counts = [layer.num_batches_tracked for layer in self._counting_layers()]
        # `torch.stack` copies the counters, because the layers increment the buffers in place.
        copies = [*torch.stack(counts)] if counts else []
        self._before = (*self._concatenate(), copies)
        self._momenta = [layer.momentum for layer in self.layers]
        for layer in self.layers:
            # Writing to `vars` takes a tenth of the time of nn.Module's attribute assignment.
            vars(layer)["momentum"] = 1.0

    def gather(self, rows: int) -> None:
        """Copy the statistics of the micro-batch of `rows` samples that was computed last."""
        if self.layers:
            self._parts.append((rows, *self._concatenate()))

    def forget(self) -> None:
        """Undo an incomplete mini-batch: restore the statistics from before it."""
        if self._momenta:
            self._write(*self._before)

    def abandon(self) -> None:
        """End a mini-batch whose capture in a CUDA graph failed.

        Its tensors are dropped, not written to the layers, because they were never computed.
        """
        self._rows_per_value = None
        if self._momenta:
            self._end()

    @torch.no_grad()
    def commit(self) -> None:
        """Update the running statistics at the end of a mini-batch."""
        if not self._parts:
            return
        before_mean, before_variance, tracked = self._before
        # Mean and unbiased variance of all micro-batches (Chan, Golub, LeVeque 1983).
        total = sum(rows for rows, _, _ in self._parts)
        mean = torch.zeros_like(before_mean)
        variance = mean
        for rows, part_mean, _ in self._parts:
            mean = torch.add(mean, part_mean, alpha=rows / total)
        rows_per_value = self._rows_per_value
        if rows_per_value is None or len(rows_per_value) != len(mean):
            per_layer = [1 / self._values[layer] for layer in self.layers]
            rows_per_value = self._expand(per_layer)
            self._rows_per_value = rows_per_value
        for rows, part_mean, unbiased in self._parts:
            biased = torch.addcmul(unbiased, unbiased, rows_per_value, value=-1 / rows)
            second_moment = biased + (part_mean - mean).square()
            variance = torch.add(variance, second_moment, alpha=rows / total)
        variance = variance / (1 - rows_per_value / total)
        torch._foreach_add_(tracked, 1)
        rate = self._rates(tracked)
        new_mean = torch.lerp(before_mean, mean, rate)
        new_variance = torch.lerp(before_variance, variance, rate)
        self._write(new_mean, new_variance, tracked)

    def _rates(self, tracked: Sequence[Tensor]) -> Any:
        """Return the weight of the new statistics, per channel or as one number for all channels.

        The weight is the layer's momentum. For a layer with momentum None, it is 1 divided by the
        number of batches in `tracked`, as in torch.
        """
        if len(set(self._momenta)) == 1 and self._momenta[0] is not None:
            return self._momenta[0]
        counts = dict(zip(self._counting_layers(), tracked, strict=True))
        rates = []
        for layer, momentum in zip(self.layers, self._momenta, strict=True):
            if momentum is None:
                rates.append(counts[layer].reciprocal())
            else:
                rates.append(momentum)
        return self._expand(rates)

    def _expand(self, numbers: Sequence[Any]) -> Tensor:
        """Repeat one number per layer for each of its channels."""
        channels = list(map(len, self._buffers("running_mean")))
        ones = torch.split(torch.ones_like(self._before[0]), channels)
        return torch.cat([part * number for part, number in zip(ones, numbers, strict=True)])

    def _counting_layers(self) -> list[Any]:
        return [layer for layer in self.layers if layer.num_batches_tracked is not None]

    @torch.no_grad()
    def _concatenate(self) -> tuple[Tensor, Tensor]:
        """Concatenate the running means and variances of all layers."""
        means = self._buffers("running_mean")
        variances = self._buffers("running_var")
        return torch.cat(means), torch.cat(variances)

    def _buffers(self, name: str) -> list[Tensor]:
        return [getattr(layer, name) for layer in self.layers]

    @torch.no_grad()
    def _write(
        self,
        mean: Tensor,
        variance: Tensor,
        tracked: list[Tensor],
    ) -> None:
        unflatten_into(mean, self._buffers("running_mean"))
        unflatten_into(variance, self._buffers("running_var"))
        if tracked:
            counts = [layer.num_batches_tracked for layer in self._counting_layers()]
            torch._foreach_copy_(counts, tracked)
        self._end()

    def _end(self) -> None:
        for layer, momentum in zip(self.layers, self._momenta, strict=True):
            vars(layer)["momentum"] = momentum
        self._parts.clear()
        self._momenta.clear()

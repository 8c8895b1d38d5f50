"""Batch normalisation in a pipeline: running statistics once a mini-batch, as if it were not cut into micro-batches.

Each micro-batch is still normalised by its own mean and variance (it has not seen the others); what is deferred are the
running statistics that evaluation uses. The idea is torchgpipe's (Kim et al., arXiv:2004.09910, section 3.3).

The layers stay as they are. While a mini-batch lasts they have momentum 1, so that their buffers take the statistics of
each micro-batch; those are noted after each forward pass of a stage, for all of its layers at once and outside of what
is compiled, and combined when the mini-batch is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data import Example
from trainer.errors import RecipeError
from trainer.models.norms import acts_as_batch_norm, statistics_layers, unlike, values_a_row


def deferrable(model: nn.Module, example: Example, remedy: str) -> dict[nn.Module, int]:
    """The layers whose statistics can be deferred, and how many values of a channel each sees of one row.

    Raises:
        RecipeError: some layer's cannot, with the `remedy`.
    """
    layers = statistics_layers(model)
    if not layers:
        return {}
    seen = values_a_row(model, example.zeros(torch.device("cpu"), 2).inputs, layers)
    refused = dict.fromkeys(unlike(layers, acts_as_batch_norm), "updates its statistics in a way of its own")
    refused |= {name: f"is called {len(n)} times in a forward pass" for name, n in seen.items() if len(n) > 1}
    for name, why in refused.items():
        raise RecipeError(
            f"layer {name or 'the model itself'} ({type(layers[name]).__name__}) {why}, so statistics of whole batches "
            f"cannot be had of its micro-batches: {remedy}"
        )
    return {layer: seen[name][0] for name, layer in layers.items() if seen[name]}


class DeferredStatistics:
    """The running statistics of a stage's layers, from the first micro-batch of a mini-batch to its `commit`."""

    def __init__(self, stage: nn.Module, values: dict[nn.Module, int]) -> None:
        """`values` of a channel in one row are as of `deferrable`."""
        self.layers: list[Any] = list(dict.fromkeys(layer for layer in stage.modules() if layer in values))
        self._values = values
        self._momenta: list[float | None] = []
        self._parts: list[tuple[int, Tensor, Tensor]] = []  # rows, mean and unbiased variance of all layers in a row
        self._before: tuple[Tensor, Tensor, list[Tensor]]  # running statistics, and of how many batches
        self._rows_a_value: Tensor | None = None  # of each channel: what one of its values is of a row

    def begin(self) -> None:
        """A micro-batch is about to be computed, perhaps the first."""
        if self._momenta:
            return
        self.layers = [layer for layer in self.layers if layer.training]
        counts = [layer.num_batches_tracked for layer in self._counting()]
        self._before = (*self._flat(), [*torch.stack(counts)] if counts else [])
        self._momenta = [layer.momentum for layer in self.layers]
        for layer in self.layers:
            vars(layer)["momentum"] = 1.0  # as nn.Module would set it, in a tenth of the time

    def gather(self, rows: int) -> None:
        """A micro-batch of so many rows was computed."""
        if self.layers:
            self._parts.append((rows, *self._flat()))

    def forget(self) -> None:
        """The mini-batch was given up."""
        if self._momenta:
            self._write(*self._before)

    def abandon(self) -> None:
        """The mini-batch was recorded to be computed later, and is not: nothing that was noted has a value."""
        self._rows_a_value = None
        if self._momenta:
            self._end()

    @torch.no_grad()
    def commit(self) -> None:
        """The mini-batch is complete: update the running statistics with what was gathered."""
        if not self._parts:
            return
        mean, variance, tracked = self._before
        for part_mean, part_variance in self._combined():
            torch._foreach_add_(tracked, 1)
            rate = self._rates(tracked)
            mean, variance = torch.lerp(mean, part_mean, rate), torch.lerp(variance, part_variance, rate)
        self._write(mean, variance, tracked)

    def _combined(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Mean and unbiased variance of the micro-batches together (Chan, Golub, LeVeque 1983)."""
        total = sum(rows for rows, _, _ in self._parts)
        mean = variance = torch.zeros_like(self._before[0])
        for rows, part, _ in self._parts:
            mean = torch.add(mean, part, alpha=rows / total)
        each = self._rows_a_value
        if each is None or len(each) != len(mean):
            each = self._rows_a_value = self._each([1 / self._values[layer] for layer in self.layers])
        for rows, part, unbiased in self._parts:
            biased = torch.addcmul(unbiased, unbiased, each, value=-1 / rows)
            variance = torch.add(variance, biased + (part - mean).square(), alpha=rows / total)
        return [(mean, variance / (1 - each / total))]

    def _rates(self, tracked: Sequence[Tensor]) -> Any:
        """Of each channel, or of all: the momentum, or without one an average over all batches there were."""
        if len(set(self._momenta)) == 1 and self._momenta[0] is not None:
            return self._momenta[0]
        counts = dict(zip(self._counting(), tracked, strict=True))
        pairs = zip(self.layers, self._momenta, strict=True)
        return self._each([counts[layer].reciprocal() if rate is None else rate for layer, rate in pairs])

    def _each(self, numbers: Sequence[Any]) -> Tensor:
        """One number of each layer, for all of its channels."""
        ones = torch.split(torch.ones_like(self._before[0]), [len(layer.running_mean) for layer in self.layers])
        return torch.cat([part * number for part, number in zip(ones, numbers, strict=True)])

    def _counting(self) -> list[Any]:
        return [layer for layer in self.layers if layer.num_batches_tracked is not None]

    @torch.no_grad()
    def _flat(self) -> tuple[Tensor, Tensor]:
        if not self.layers:
            return torch.empty(0), torch.empty(0)
        means, variances = ([getattr(layer, name) for layer in self.layers] for name in ("running_mean", "running_var"))
        return torch.cat(means), torch.cat(variances)

    @torch.no_grad()
    def _write(self, mean: Tensor, variance: Tensor, tracked: list[Tensor]) -> None:
        for name, flat in (("running_mean", mean), ("running_var", variance)) if self.layers else ():
            buffers = [getattr(layer, name) for layer in self.layers]
            torch._foreach_copy_(buffers, torch.split(flat, [len(buffer) for buffer in buffers]))
        if tracked:
            torch._foreach_copy_([layer.num_batches_tracked for layer in self._counting()], tracked)
        self._end()

    def _end(self) -> None:
        for layer, momentum in zip(self.layers, self._momenta, strict=True):
            vars(layer)["momentum"] = momentum
        self._parts.clear()
        self._momenta.clear()

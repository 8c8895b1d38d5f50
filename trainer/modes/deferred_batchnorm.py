"""Batch normalisation in a pipeline: running statistics once a mini-batch, as if it were not cut into micro-batches.

Each micro-batch is still normalised by its own mean and variance (it has not seen the others); what is deferred are the
running statistics that evaluation uses. The idea is torchgpipe's (Kim et al., arXiv:2004.09910, section 3.3).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.models.blocks import keeps_statistics


class DeferredBatchNorm(_BatchNorm):
    """Batch normalisation that gathers its statistics until `commit`. Inputs (N, C, ...)."""

    gathering = True  # off while activations are computed a second time
    _count = 0  # values a channel since the last commit, and their mean and summed squared deviations from it
    _mean: Tensor
    _squares: Tensor

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected (N, C, ...), got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        affine = self.weight, self.bias
        if not self.training or self.running_mean is None:
            alone = self.running_mean is None
            return batch_norm(input, self.running_mean, self.running_var, *affine, alone, 0.0, self.eps)
        self._check_input_dim(input)
        # With momentum 1 the "running" statistics are those of this micro-batch.
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_mean)
        out = batch_norm(input, mean, variance, *affine, True, 1.0, self.eps)
        if DeferredBatchNorm.gathering:
            self._fold(mean, variance, input.numel() // input.shape[1])
        return out

    def _fold(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Take in a part's mean and unbiased variance (Chan, Golub, LeVeque 1983: the pairwise update)."""
        if self._count == 0:
            self._count, self._mean, self._squares = count, mean, variance * (count - 1)
            return
        total = self._count + count
        delta = mean - self._mean
        self._squares = self._squares + variance * (count - 1) + delta.square() * (self._count * count / total)
        self._mean = self._mean + delta * (count / total)
        self._count = total

    def forget(self) -> None:
        """The mini-batch was given up."""
        self._count = 0

    def commit(self) -> None:
        """The mini-batch is complete: update the running statistics with what was gathered."""
        if self._count == 0 or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked += 1
            share = self.momentum if self.momentum is not None else self.num_batches_tracked.reciprocal()
            self.running_mean.lerp_(self._mean, share)
            self.running_var.lerp_(self._squares / max(1, self._count - 1), share)
        self._count = 0


def convert_deferred_batchnorm(module: nn.Module) -> list[DeferredBatchNorm]:
    """Replace batch normalisation that trains within `module`; names, parameters and buffers stay the same objects."""
    for owner in list(module.modules()):
        for name, child in list(owner.named_children()):
            known = type(child) is DeferredBatchNorm or keeps_statistics(child)
            if isinstance(child, _BatchNorm) and not known:
                setattr(owner, name, _deferred(child))
    return [layer for layer in module.modules() if isinstance(layer, DeferredBatchNorm)]


def _deferred(layer: _BatchNorm) -> DeferredBatchNorm:
    deferred = DeferredBatchNorm(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    deferred._parameters, deferred._buffers = dict(layer._parameters), dict(layer._buffers)
    return deferred.train(layer.training)


class recomputing:
    """Forward passes in here repeat earlier ones: their statistics have been gathered. Can be entered again."""

    def __enter__(self) -> None:
        DeferredBatchNorm.gathering = False

    def __exit__(self, *_: object) -> None:
        DeferredBatchNorm.gathering = True

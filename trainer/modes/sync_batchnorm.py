"""Batch normalisation over all ranks, on any device: `nn.SyncBatchNorm` refuses the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.models.blocks import keeps_statistics


def convert_sync_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """Replace batch normalisation that trains by one that sees the global batch, with the same parameters, buffers."""
    for name, child in list(model.named_children()):
        if isinstance(child, _BatchNorm) and keeps_statistics(child):
            continue
        if isinstance(child, _BatchNorm) and device.type == "cuda":
            setattr(model, name, nn.SyncBatchNorm.convert_sync_batchnorm(child))  # type: ignore[no-untyped-call]
        elif isinstance(child, _BatchNorm):
            synchronised = SyncBatchNorm(
                child.num_features, child.eps, child.momentum, child.affine, child.track_running_stats
            )
            # The same objects: what is frozen stays so.
            synchronised._parameters, synchronised._buffers = dict(child._parameters), dict(child._buffers)
            setattr(model, name, synchronised.train(child.training))
        else:
            convert_sync_batchnorm(child, device)
    return model


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is the all-reduced gradient: every rank's result depends on every rank's input."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def _sum_over_ranks(values: Tensor) -> Tensor:
    total: Tensor = _SumOverRanks.apply(values)
    return total


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose mean and variance are those of all ranks' rows (Ioffe and Szegedy, arXiv:1502.03167).

    Every rank must hold the same number of rows. Inputs (N, C, ...).
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected (N, C, ...), got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        count = input.numel() // input.shape[1] * dist.get_world_size()
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        # The second sum is of deviations: a mean of squares less a squared mean loses a small variance's digits.
        mean = _sum_over_ranks(input.float().sum(axes)) / count
        deviation = input.float() - mean.view(shape)
        variance = _sum_over_ranks(deviation.square().sum(axes)) / count
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                self.num_batches_tracked += 1
                share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
                self.running_mean.lerp_(mean, share)
                self.running_var.lerp_(variance * (count / max(1, count - 1)), share)
        out = deviation * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None and self.bias is not None:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(input.dtype)

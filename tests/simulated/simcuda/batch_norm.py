"""Kernels of `nn.SyncBatchNorm`, which exist for GPUs alone, in plain operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

AXES = [0, 2, 3]


def column(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.float().mean(AXES), torch.rsqrt(x.float().var(AXES, unbiased=False) + eps)


def gather_stats(
    x: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    total, share = counts.sum(), counts[:, None] / counts.sum()
    mean = (means * share).sum(0)
    variance = ((invstds**-2 - eps + means**2) * share).sum(0) - mean**2
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(variance * total / (total - 1), momentum)
    return mean, torch.rsqrt(variance + eps)


def elemt(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    return ((x - column(mean)) * column(invstd * weight) + column(bias)).to(x.dtype)


def backward_reduce(gradient: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, *wanted: bool) -> Any:
    products = (gradient * (x - column(mean))).sum(AXES)
    return gradient.sum(AXES), products, products * invstd, gradient.sum(AXES)


def backward_elemt(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
    sums: Tensor,
    products: Tensor,
    counts: Tensor,
) -> Tensor:
    total = counts.sum()
    inner = gradient - column(sums / total) - (x - column(mean)) * column(invstd**2 * products / total)
    return (inner * column(invstd * weight)).to(x.dtype)


KERNELS = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather_stats,
    "batch_norm_elemt": elemt,
    "batch_norm_backward_reduce": backward_reduce,
    "batch_norm_backward_elemt": backward_elemt,
}

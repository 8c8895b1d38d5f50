"""Batch normalisation over all ranks, on any device.

The layers stay as they are, subclasses with an activation inside as well: what they ask of
`torch.nn.functional.batch_norm` is answered with the mean and variance of all ranks' rows (Ioffe and Szegedy,
arXiv:1502.03167). Not `nn.SyncBatchNorm`, which refuses the CPU and waits for the device three times a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm

from trainer.errors import RecipeError
from trainer.models.norms import BatchNormCalls, acts_as_batch_norm, training_norms, unlike


def synchronise_batch_norm(model: nn.Module) -> list[nn.Module]:
    """Let batch normalisation that trains see the global batch, of which ranks may hold unequal parts; its layers.

    Raises RecipeError naming a subclass that normalises in a way of its own.
    """
    layers = training_norms(model)
    for name, layer in unlike(layers, acts_as_batch_norm).items():
        raise RecipeError(
            f"sync_bn=true: layer {name or 'the model itself'} ({type(layer).__name__}) normalises in a way of its own "
            "and would see this rank's rows alone: leave sync_bn out, or make it nn.BatchNorm2d"
        )
    for layer in layers.values():
        layer.forward = _over_ranks(layer.forward)  # type: ignore[method-assign]
    return [*layers.values()]


def _over_ranks(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A layer's own `forward`, which may do more than normalise."""

    def over_ranks(*args: Any, **kwargs: Any) -> Tensor:
        with BatchNormCalls(global_batch_norm):
            return forward(*args, **kwargs)

    return over_ranks


def global_batch_norm(
    inputs: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.batch_norm` of all ranks' rows. Inputs (N, C, ...)."""
    if not training:
        return batch_norm(inputs, running_mean, running_var, weight, bias, False, momentum, eps)
    out: Tensor
    out, mean, variance, count = _GlobalBatchNorm.apply(inputs, weight, bias, eps)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
    return out


def _statistics(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of a rank's rows, at least in single precision."""
    precision = torch.promote_types(inputs.dtype, torch.float32)
    if torch.compiler.is_compiling():  # which makes one loop of it
        axes = [axis for axis in range(inputs.dim()) if axis != 1]
        variance, mean = torch.var_mean(inputs.to(precision), axes, correction=0)
        return mean, variance
    # The running statistics, which are not wanted here, make torch compute in their precision.
    unused = torch.zeros(2, inputs.shape[1], dtype=precision, device=inputs.device)
    mean, variance = torch.batch_norm_update_stats(inputs, unused[0], unused[1], 0.0)
    return mean, variance


class _GlobalBatchNorm(torch.autograd.Function):
    """Two collectives a layer: statistics forward, and the sums of gradients backward.

    A rank's mean and variance are computed before they are combined, so that a small variance keeps its digits
    beside a large mean. Nothing waits for the device.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance = _statistics(inputs)
        local = torch.stack([mean, variance, torch.full_like(mean, inputs.numel() // inputs.shape[1])])
        # A row a rank, of which each fills its own: with equal rows that is what `all_gather` does, in every version.
        every = local.new_zeros(dist.get_world_size(), *local.shape)
        every[dist.get_rank()] = local
        dist.all_reduce(every)
        means, variances, counts = every.unbind(1)
        count = counts.sum(0)
        shares = counts / count
        mean = (shares * means).sum(0)
        apart = means - mean
        variance = (shares * torch.addcmul(variances, apart, apart)).sum(0)
        ctx.save_for_backward(inputs, weight, mean, variance, count)
        ctx.eps, ctx.biased = eps, bias is not None
        ctx.mark_non_differentiable(mean, variance, count)
        return batch_norm(inputs, mean, variance, weight, bias, False, 0.0, eps), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        inputs, weight, mean, variance, count = ctx.saved_tensors
        if gradient.stride() != inputs.stride():
            gradient = torch.empty_like(inputs).copy_(gradient)
        scale, ones = torch.rsqrt(variance + ctx.eps), torch.ones_like(mean)
        # Of these rows: the sums of the gradient times the normalised inputs, and of the gradient.
        _, *sums = torch.ops.aten.native_batch_norm_backward(
            gradient, inputs, ones, mean, variance, mean, scale, False, ctx.eps, [False, True, True]
        )
        local = torch.stack(sums)
        means = local / count
        dist.all_reduce(means)
        # The gradient's mean and its part along the normalised inputs change no output: they are taken out.
        inner = gradient - batch_norm(inputs, mean, variance, means[0], means[1], False, 0.0, ctx.eps)
        scale = scale if weight is None else scale * weight
        inner *= scale.view(-1, *[1] * (inputs.dim() - 2))
        return inner, local[0] if weight is not None else None, local[1] if ctx.biased else None, None

"""Batch normalization over all ranks, on any device.

The layers stay as they are, including subclasses with an activation inside. Their calls of
`torch.nn.functional.batch_norm` are replaced by a version that uses the mean and variance of all
ranks' rows (Ioffe and Szegedy, arXiv:1502.03167). `nn.SyncBatchNorm` is not used, because it
refuses the CPU and waits for the device three times per layer.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm

from trainer.errors import RecipeError
from trainer.models.norms import (
    BatchNormCalls,
    list_training_norms,
    select_unlike_batch_norm,
)


def synchronise_batch_norm(model: nn.Module) -> None:
    """Let the BatchNorm layers that train normalize over the global batch.

    The local batches of the ranks may have different sizes.

    Raises:
        RecipeError: a subclass of BatchNorm computes something other than BatchNorm.
    """
    layers = list_training_norms(model)
    for name, layer in select_unlike_batch_norm(layers).items():
        raise RecipeError(
            f"sync_bn=true: layer {name or 'the model itself'} ({type(layer).__name__}) normalizes "
            "in a way of its own and would see only this rank's rows: leave sync_bn out, or make "
            "it nn.BatchNorm2d"
        )
    for layer in layers.values():
        layer.forward = _normalize_over_ranks(layer.forward)  # type: ignore[method-assign]


def _normalize_over_ranks(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a layer's `forward` so that its calls of `F.batch_norm` normalize over all ranks.

    The rest of `forward`, such as an activation, is unchanged.
    """

    def forward_over_ranks(*args: Any, **kwargs: Any) -> Tensor:
        with BatchNormCalls(global_batch_norm):
            return forward(*args, **kwargs)

    return forward_over_ranks


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
    """Compute `torch.nn.functional.batch_norm` of inputs (N, C, ...) over all ranks' samples.

    If `training` is False, the running statistics are used and no rank communicates.
    """
    if not training:
        return batch_norm(inputs, running_mean, running_var, weight, bias, False, momentum, eps)
    out: Tensor
    out, mean, variance, count = _GlobalBatchNorm.apply(inputs, weight, bias, eps)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            unbiased = variance * (count / (count - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return out


def _compute_statistics(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and biased variance of this rank's samples, at least in single precision."""
    precision = torch.promote_types(inputs.dtype, torch.float32)
    # `var_mean` is used in compiled code, because the compiler fuses it into one loop.
    if torch.compiler.is_compiling():
        axes = [axis for axis in range(inputs.dim()) if axis != 1]
        variance, mean = torch.var_mean(inputs.to(precision), axes, correction=0)
        return mean, variance
    # Torch computes in the precision of the running statistics that it receives, so two unused
    # vectors of `precision` are passed as running statistics.
    unused = torch.zeros(2, inputs.shape[1], dtype=precision, device=inputs.device)
    mean, variance = torch.batch_norm_update_stats(inputs, unused[0], unused[1], 0.0)
    return mean, variance


class _GlobalBatchNorm(torch.autograd.Function):
    """Batch normalization with two collectives per layer.

    Ranks exchange statistics in the forward pass and sums of gradients in the backward pass. Each
    rank computes mean and variance before they are combined, so that a small variance keeps its
    digits next to a large mean. Neither pass makes the host wait for the device.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance = _compute_statistics(inputs)
        values_per_channel = inputs.numel() // inputs.shape[1]
        local = torch.stack([mean, variance, torch.full_like(mean, values_per_channel)])
        # The sum is an all-gather that every version of torch supports, because each rank fills
        # only its own row.
        gathered = local.new_zeros(dist.get_world_size(), *local.shape)
        gathered[dist.get_rank()] = local
        dist.all_reduce(gathered)
        means, variances, counts = gathered.unbind(1)
        count = counts.sum(0)
        shares = counts / count
        mean = (shares * means).sum(0)
        offsets = means - mean
        variance = (shares * torch.addcmul(variances, offsets, offsets)).sum(0)
        ctx.save_for_backward(inputs, weight, mean, variance, count)
        ctx.eps = eps
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(mean, variance, count)
        outputs = batch_norm(inputs, mean, variance, weight, bias, False, 0.0, eps)
        return outputs, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        gradient: Tensor,
        *_: Any,
    ) -> tuple[Tensor | None, ...]:
        inputs, weight, mean, variance, count = ctx.saved_tensors
        if gradient.stride() != inputs.stride():
            gradient = torch.empty_like(inputs).copy_(gradient)
        scale = torch.rsqrt(variance + ctx.eps)
        ones = torch.ones_like(mean)
        # Two sums over this rank's samples: of the gradient times the normalized inputs, and of the
        # gradient alone.
        _, *sums = torch.ops.aten.native_batch_norm_backward(
            gradient,
            inputs,
            ones,
            mean,
            variance,
            mean,
            scale,
            False,
            ctx.eps,
            [False, True, True],
        )
        local = torch.stack(sums)
        means = local / count
        dist.all_reduce(means)
        # Normalized outputs do not change if all inputs are shifted or scaled, so the components of
        # the gradient in these two directions are removed.
        projected = gradient - batch_norm(
            inputs,
            mean,
            variance,
            means[0],
            means[1],
            False,
            0.0,
            ctx.eps,
        )
        weight_gradient = None
        if weight is not None:
            scale = scale * weight
            weight_gradient = local[0]
        projected *= scale.view(-1, *[1] * (inputs.dim() - 2))
        bias_gradient = local[1] if ctx.has_bias else None
        return projected, weight_gradient, bias_gradient, None

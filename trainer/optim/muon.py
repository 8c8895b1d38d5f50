"""Optimizer Muon for weight matrices, combined with AdamW for all other parameters."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

# Constants of the Newton-Schulz iteration, the same as in `torch.optim.Muon`.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MIN_NORM = 1e-7


class MuonAdamW(torch.optim.Optimizer):
    """Muon for weight matrices and AdamW for all other parameters.

    The updates are those of `torch.optim.Muon` and `torch.optim.AdamW`. The weight of a convolution
    is viewed as a matrix with a row for each output channel (Jordan et al., "Muon: An optimizer for
    hidden layers in neural networks", https://kellerjordan.github.io/posts/muon).

    Matrices of the same shape are updated together: torch's own Muon launches thirty kernels for
    each matrix, and launching takes longer than computing. The learning rate of each matrix is
    scaled by its shape so that steps are as long as AdamW's (torch's match_rms_adamw; Liu et al.,
    "Muon is Scalable for LLM Training", arXiv:2502.16982). A learning rate and a weight decay that
    suit AdamW therefore suit both.

    If `found_inf`, a flag on the device, is set, a step changes nothing. The host does not wait for
    the flag. Matrices are updated in place, as in torch, because updates by other workers must not
    be lost under Hogwild. The learning rate may be a tensor on the device, which the replay of a
    CUDA graph reads (see `LearningRates`).
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        matrices: Collection[nn.Parameter],
        lr: float,
        momentum: float,
        nesterov: bool,
        adamw_lr: float | None = None,
        **adamw_options: Any,
    ) -> None:
        """Split `groups`, in the format of torch's optimizers, between Muon and AdamW.

        Args:
            groups: parameter groups.
            matrices: parameters for Muon; AdamW trains the others.
            lr: learning rate of both, or of Muon if `adamw_lr` is a number.
            momentum: momentum of Muon, 0 to 1.
            nesterov: whether Muon uses Nesterov momentum.
            adamw_lr: learning rate of AdamW. Its ratio to `lr` becomes a factor of the `rate` of
                AdamW's groups, so that a schedule changes both in proportion.
            **adamw_options: further arguments of AdamW.
        """
        ratio = 1.0
        if adamw_lr is not None:
            ratio = adamw_lr / lr
        muon_groups = []
        other_groups = []
        for group in groups:
            other_parameters = []
            for p in group["params"]:
                if p in matrices:
                    muon_groups.append(group | {"params": [p], "lr": lr})
                else:
                    other_parameters.append(p)
            if other_parameters:
                rate = group["rate"] * ratio
                other_groups.append(group | {"params": other_parameters, "rate": rate})
        self.adamw: AdamW | None = None
        adamw_groups = []
        if other_groups:
            self.adamw = AdamW(other_groups, lr=lr, **adamw_options)
            adamw_groups = self.adamw.param_groups
        super().__init__([*muon_groups, *adamw_groups] or groups, {"lr": lr})
        # GradScaler sets `found_inf` if this attribute is True. Otherwise it reads the flag itself,
        # and the host waits for the device.
        self._step_supports_amp_scaling = True
        self.muon_groups = self.param_groups[: len(muon_groups)]
        self.momentum = momentum
        self.nesterov = nesterov
        if self.adamw:
            self.adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step with the current gradients."""
        batches: dict[tuple[Any, ...], list[_MatrixUpdate]] = {}
        rates = {}
        for group in self.muon_groups:
            (parameter,) = group["params"]
            if parameter.grad is None:
                continue
            buffer = self.state[parameter]["momentum_buffer"]
            update = _view_as_matrices(parameter, buffer, parameter.grad)
            device = parameter.device
            decay = group["weight_decay"]
            # Groups with the same factor `rate` have the same learning rate. The learning rates
            # are not compared, because they may be tensors and the host would wait for the device.
            kind = group["rate"], decay, device
            if kind not in rates:
                rates[kind] = _StepRates(group["lr"], decay, self.found_inf, device)
            batch_key = kind, update.matrix.shape, parameter.dtype
            batches.setdefault(batch_key, []).append(update)
        for (kind, *_), batch in batches.items():
            self._update(batch, rates[kind])
        if self.adamw:
            self.adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
            self.adamw.step()

    def _update(self, batch: list[_MatrixUpdate], rates: _StepRates) -> None:
        """Update matrices of the same shape, with one kernel per operation for all of them."""
        matrices = [update.matrix for update in batch]
        buffers = [update.buffer for update in batch]
        gradients = torch.stack([update.gradient for update in batch])
        if rates.is_bad is not None:
            # If the overflow flag is set, the gradients are replaced by the momentum buffers:
            # interpolating a buffer towards itself leaves it unchanged.
            gradients = torch.where(rates.is_bad, torch.stack(buffers), gradients)
        torch._foreach_lerp_(buffers, gradients.unbind(), 1 - self.momentum)
        direction = torch.stack(buffers)
        if self.nesterov:
            direction = gradients.lerp(direction, self.momentum)
        direction = orthogonalize(direction)
        torch._foreach_mul_(matrices, rates.keep)
        updates = direction.to(matrices[0].dtype).contiguous().unbind()
        # The factor makes steps as long as AdamW's (Liu et al., see the class).
        longer_side = max(matrices[0].shape)
        lr = rates.times(0.2 * math.sqrt(longer_side))
        # The fused kernel accepts the rate as a number or a tensor, and skips the update if the
        # flag is set.
        torch._fused_sgd_(
            matrices,
            updates,
            [],
            lr=lr,
            weight_decay=0.0,
            momentum=0.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            found_inf=rates.flag,
        )


class _MatrixUpdate(NamedTuple):
    """Tensors of one weight, each as a matrix with a row per output channel.

    Attributes:
        matrix: view of the weight, which the step updates in place.
        buffer: view of the momentum buffer, which the step updates in place.
        gradient: gradient of the weight, a view or a copy.
    """

    matrix: Tensor
    buffer: Tensor
    gradient: Tensor


class _StepRates:
    """Learning rate, weight decay and overflow flag of matrices on one device in one step.

    A learning rate that is a tensor is converted to float64, the type of Python numbers, so that
    the results do not depend on whether it is a tensor or a number.
    """

    def __init__(
        self,
        lr: float | Tensor,
        decay: float,
        flag: Tensor | None,
        device: torch.device,
    ) -> None:
        if isinstance(lr, Tensor):
            lr = lr.to(device, torch.float64, non_blocking=True)
        self.lr = lr
        # The step multiplies the weights by this factor: 1 - learning rate * weight decay, or 1 if
        # the overflow flag is set.
        self.keep: Any = 1 - lr * decay
        if isinstance(self.keep, Tensor):
            self.keep = self.keep.float()
        self.flag: Tensor | None = None
        self.is_bad: Tensor | None = None
        if flag is not None:
            self.flag = flag.to(device, non_blocking=True)
            self.is_bad = self.flag > 0
            self.keep = torch.where(self.is_bad, 1.0, self.keep)

    def times(self, factor: float) -> float | Tensor:
        """Return the learning rate times `factor`, in float32."""
        product = factor * self.lr
        if isinstance(product, Tensor):
            return product.float()
        return round_to_float32(product)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximate the nearest semi-orthogonal matrix of each matrix, in bf16 like torch's Muon.

    The singular values of the result are only roughly 1.

    Args:
        matrices: N matrices, (N, rows, columns).

    Returns:
        The approximations, of the same shape.
    """
    x = matrices.bfloat16()
    # Tall matrices are transposed, so that the iteration multiplies by the smaller Gram matrix.
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    norms = x.norm(dim=(1, 2), keepdim=True)
    x = x / norms.clamp(min=MIN_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    if is_tall:
        return x.mT
    return x


def _view_as_matrices(weight: Tensor, buffer: Tensor, gradient: Tensor) -> _MatrixUpdate:
    if not weight.is_contiguous():
        # A weight in channels_last can be viewed as a matrix only with its channels at the end.
        weight = weight.movedim(1, -1)
        buffer = buffer.movedim(1, -1)
        gradient = gradient.movedim(1, -1)
    rows = len(weight)
    return _MatrixUpdate(
        matrix=weight.view(rows, -1),
        buffer=buffer.view(rows, -1),
        gradient=gradient.reshape(rows, -1),
    )


def round_to_float32(number: float) -> float:
    """Round to the nearest float32 number."""
    return ctypes.c_float(number).value

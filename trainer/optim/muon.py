"""Optimizer Muon for weight matrices, combined with AdamW for all other parameters."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from trainer.devices.precision import is_emulated
from trainer.distributed.matrix_exchange import MatrixExchange

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
    # With an exchange, each parameter has only some rows of its matrix.
    exchange: MatrixExchange | None = None

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
        if other_groups:
            self.adamw = AdamW(other_groups, lr=lr, **adamw_options)
        # Both optimizers have the same dictionaries as groups.
        super().__init__([*muon_groups, *other_groups] or groups, {"lr": lr})
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
            height = len(parameter)
            if self.exchange is not None:
                height = self.exchange.count_rows(parameter)
            batch_key = kind, height, update.matrix.shape, parameter.dtype
            batches.setdefault(batch_key, []).append(update)
        directions = {}
        for (kind, height, *_), batch in batches.items():
            direction = self._accumulate(batch, rates[kind])
            if self.exchange is None:
                self._update(batch, orthogonalize(direction), rates[kind], height)
                continue
            for update, rows in zip(batch, direction.bfloat16(), strict=True):
                directions[update.parameter] = rows
        if self.exchange is not None:
            # The order of the batches depends on the rows of a rank, that of the groups does not.
            parameters = [group["params"][0] for group in self.muon_groups]
            ordered = {p: directions[p] for p in parameters if p in directions}
            results = self.exchange.compute(ordered, orthogonalize_each)
            for (kind, height, *_), batch in batches.items():
                direction = torch.stack([results[update.parameter] for update in batch])
                self._update(batch, direction, rates[kind], height)
        if self.adamw:
            self.adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
            self.adamw.step()

    def _accumulate(self, batch: list[_MatrixUpdate], rates: _StepRates) -> Tensor:
        """Update the momentum buffers of matrices of the same shape, and return the directions.

        Returns:
            What a step orthogonalizes, (matrices, rows, columns).
        """
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
        return direction

    def _update(
        self, batch: list[_MatrixUpdate], direction: Tensor, rates: _StepRates, height: int
    ) -> None:
        """Update matrices of the same shape, with one kernel per operation for all of them.

        Args:
            batch: the matrices, or this rank's rows of them.
            direction: orthogonal directions, (matrices, rows, columns).
            rates: rates of this step.
            height: number of rows of each whole matrix.
        """
        matrices = [update.matrix for update in batch]
        torch._foreach_mul_(matrices, rates.keep)
        updates = direction.to(matrices[0].dtype).contiguous().unbind()
        # The factor makes steps as long as AdamW's (Liu et al., see the class).
        longer_side = max(height, matrices[0].shape[1])
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
        parameter: the weight.
        matrix: view of the weight, which the step updates in place.
        buffer: view of the momentum buffer, which the step updates in place.
        gradient: gradient of the weight, a view or a copy.
    """

    parameter: nn.Parameter
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

    The singular values of the result are only roughly 1. A CPU that emulates bf16 computes in fp32,
    several times as fast, and only the result is rounded to bf16.

    Args:
        matrices: N matrices, (N, rows, columns).

    Returns:
        The approximations, of the same shape.
    """
    x = matrices.bfloat16()
    if x.device.type == "cpu" and is_emulated("bf16", x.device):
        x = x.float()
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
        x = x.mT
    return x.bfloat16()


def orthogonalize_each(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return `orthogonalize` of matrices of any shapes, (rows, columns) each."""
    indices: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(matrices):
        indices.setdefault(matrix.shape, []).append(index)
    results = [*matrices]
    for group in indices.values():
        stacked = torch.stack([matrices[index] for index in group])
        for index, result in zip(group, orthogonalize(stacked), strict=True):
            results[index] = result
    return results


def _view_as_matrices(parameter: nn.Parameter, buffer: Tensor, gradient: Tensor) -> _MatrixUpdate:
    weight: Tensor = parameter
    if not weight.is_contiguous():
        # A weight in channels_last can be viewed as a matrix only with its channels at the end.
        weight = weight.movedim(1, -1)
        buffer = buffer.movedim(1, -1)
        gradient = gradient.movedim(1, -1)
    # A rank may have no rows, and then -1 would be ambiguous.
    shape = len(weight), math.prod(weight.shape[1:])
    return _MatrixUpdate(
        parameter=parameter,
        matrix=weight.view(shape),
        buffer=buffer.view(shape),
        gradient=gradient.reshape(shape),
    )


def round_to_float32(number: float) -> float:
    """Round to the nearest float32 number."""
    return ctypes.c_float(number).value

"""Muon for hidden layers and AdamW for all else, as one optimizer that a flag on the device makes skip."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

QUINTIC, ITERATIONS, SMALLEST = (3.4445, -4.7750, 2.0315), 5, 1e-7  # of the Newton-Schulz iteration, as torch has them


class MuonAdamW(torch.optim.Optimizer):
    """The updates of `torch.optim.Muon` and of `torch.optim.AdamW` on their own parameters, at one learning rate.

    A convolution's weight is a matrix with a row for each output channel (Jordan et al., "Muon: An optimizer for hidden
    layers in neural networks", https://kellerjordan.github.io/posts/muon), a view of it. Matrices of one shape are
    updated together: torch's own Muon launches thirty kernels for each, which take longer than what they compute.
    Its rate is adjusted to each matrix's shape so that its steps are as long as AdamW's (torch's match_rms_adamw, of
    Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982): a rate and a decay that suit AdamW suit both.
    Where `found_inf` says so nothing changes, and nothing waits for it. Matrices are written in place, as torch's steps
    do: under Hogwild other workers' updates of them must not be lost.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        matrices: Collection[nn.Parameter],
        lr: float,
        momentum: float,
        nesterov: bool,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """`groups` are as torch's optimizers take them; `betas` and `eps` are AdamW's, the other numbers Muon's."""
        muon = [{**group, "params": [p], "lr": lr} for group in groups for p in group["params"] if p in matrices]
        others = [{**group, "params": [p for p in group["params"] if p not in matrices]} for group in groups]
        others = [group for group in others if group["params"]]
        self.adamw = AdamW(others, lr=lr, betas=betas, eps=eps, fused=True) if others else None
        adamw = self.adamw.param_groups if self.adamw is not None else []
        super().__init__([*muon, *adamw] or groups, {"lr": lr})
        self._step_supports_amp_scaling = True
        self.muon_groups = self.param_groups[: len(muon)]
        self.momentum, self.nesterov = momentum, nesterov
        if self.adamw is not None:
            self.adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step on the gradients there are."""
        alike: dict[tuple[Any, ...], list[tuple[Tensor, Tensor, Tensor]]] = {}
        for group in self.muon_groups:
            (parameter,) = group["params"]
            if parameter.grad is None:
                continue
            views = _matrices(parameter, self.state[parameter]["momentum_buffer"], parameter.grad)
            kind = (views[0].shape, parameter.dtype, parameter.device, group["lr"], group["weight_decay"])
            alike.setdefault(kind, []).append(views)
        for (*_, lr, decay), some in alike.items():
            matrices, buffers, gradients = (list(tensors) for tensors in zip(*some, strict=True))
            self._update(matrices, buffers, gradients, lr, decay)
        if self.adamw is not None:
            self.adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
            self.adamw.step()

    def _update(
        self, matrices: list[Tensor], buffers: list[Tensor], given: list[Tensor], lr: float, decay: float
    ) -> None:
        """A step of matrices of one shape: each operation once for all of them."""
        gradients, keep = torch.stack(given), 1 - lr * decay
        bad = None if self.found_inf is None else self.found_inf.to(gradients.device, non_blocking=True) > 0
        if bad is not None:  # a momentum drawn to itself, a factor of 1 and an update of 0 leave all as it is
            gradients = torch.where(bad, torch.stack(buffers), gradients)
        torch._foreach_lerp_(buffers, gradients.unbind(), 1 - self.momentum)
        update = torch.stack(buffers)
        update = orthogonal(gradients.lerp(update, self.momentum) if self.nesterov else update)
        if bad is not None:
            update = torch.where(bad, 0.0, update)
        torch._foreach_mul_(matrices, keep if bad is None else torch.where(bad, 1.0, keep))
        rate = 0.2 * math.sqrt(max(matrices[0].shape)) * lr  # steps as long as AdamW's
        torch._foreach_add_(matrices, update.to(matrices[0].dtype).unbind(), alpha=-rate)


def orthogonal(matrices: Tensor) -> Tensor:
    """About the nearest orthogonal matrix to each of (N, rows, columns), in bf16: as torch's Muon, several at once."""
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST)
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if tall else x


def _matrices(weight: Tensor, buffer: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each of shape (outputs, all else), the first two as views, whatever the memory format of the weight."""
    first, second, third = (
        tensor if weight.is_contiguous() else tensor.movedim(1, -1) for tensor in (weight, buffer, gradient)
    )
    rows = len(weight)
    return first.view(rows, -1), second.view(rows, -1), third.reshape(rows, -1)

"""LARS: momentum with a learning rate of its own for each layer, for batches of many thousand images."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling.

    You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (arXiv:1708.03888), section 4, alg. 1.
    With weights w, gradient g, velocity v, momentum m, weight decay b and trust coefficient t, for each layer:

        rate = lr * t * |w| / (|g| + b * |w|);   v = m * v + rate * (g + b * w);   w = w - v

    A layer is a tensor. Biases and normalisation (one-dimensional), and layers of which a norm is zero, have the plain
    `lr`. A step whose gradients were not finite, as `found_inf` says on the device, changes nothing and waits for
    nothing: the same interface as that of torch's fused optimizers.

    Other than SGD's momentum a velocity has the learning rate in it. Its state has a name of its own, so that no
    checkpoint of the one is continued as the other.
    """

    found_inf: Tensor | None = None

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float, trust: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "trust": trust, "weight_decay": 0.0})
        self._step_supports_amp_scaling = True
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["velocity"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step on the gradients there are."""
        for group in self.param_groups:
            parameters: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            for device in dict.fromkeys(p.device for p in parameters):  # of a split model several
                self._update([p for p in parameters if p.device == device], group)

    def _update(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Some of a group's parameters, on one device."""
        lr, decay, device = group["lr"], group["weight_decay"], weights[0].device
        gradients = [p.grad for p in weights if p.grad is not None]
        velocities = [self.state[p]["velocity"] for p in weights]
        weight, gradient = (torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, gradients))
        adapted = group["trust"] * weight / (gradient + decay * weight)
        rates = lr * torch.where((weight == 0) | (gradient == 0), 1.0, adapted)
        plain = torch.full((), lr, device=device)
        each = [rate if p.ndim > 1 else plain for p, rate in zip(weights, rates.unbind(), strict=True)]
        updates = list(torch._foreach_add(gradients, weights, alpha=decay))
        torch._foreach_mul_(updates, each)
        go, momentum = torch.ones((), device=device), torch.full((), group["momentum"], device=device)
        if self.found_inf is not None:
            bad = self.found_inf.to(device, non_blocking=True) > 0
            updates = [torch.where(bad, 0.0, update) for update in updates]  # 0 x NaN would be NaN
            go, momentum = torch.where(bad, 0.0, go), torch.where(bad, 1.0, momentum)
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, updates)
        torch._foreach_copy_(updates, velocities)
        torch._foreach_mul_(updates, go)
        torch._foreach_add_(weights, updates, alpha=-1)

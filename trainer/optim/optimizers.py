"""The recipe's optimizer, Muon among them, on the parameters that a rank has, and its state by their names."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from trainer.optim.trainable import Roles
from trainer.recipe import OptimizerRecipe

QUINTIC, ITERATIONS, SMALLEST = (3.4445, -4.7750, 2.0315), 5, 1e-7  # of the Newton-Schulz iteration, as torch has them
NO_ROLES = Roles()


class MuonAdamW(torch.optim.Optimizer):
    """The updates of `torch.optim.Muon` and of `torch.optim.AdamW` on their own parameters, at one learning rate.

    A convolution's weight is a matrix with a row for each output channel (Jordan et al., "Muon: An optimizer for hidden
    layers in neural networks", https://kellerjordan.github.io/posts/muon), a view of it. Matrices of one shape are
    updated together: torch's own Muon launches thirty kernels for each, which take longer than what they compute.
    Its rate is adjusted to each matrix's shape so that its steps are as long as AdamW's (torch's match_rms_adamw, of
    Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982): a rate and a decay that suit AdamW suit both.
    Where `found_inf` says so nothing changes, and nothing waits for it. Matrices are written in place, as torch's steps
    do: under Hogwild other workers' updates of them must not be lost. The learning rate may be a tensor on the device,
    which a recorded step reads there: see `LearningRates`.
    """

    found_inf: Tensor | None = None

    def __init__(
        self, groups: Sequence[dict[str, Any]], matrices: Collection[nn.Parameter], recipe: OptimizerRecipe
    ) -> None:
        """`groups` are as torch's optimizers take them."""
        lr = recipe.lr
        muon = [{**group, "params": [p], "lr": lr} for group in groups for p in group["params"] if p in matrices]
        others = [{**group, "params": [p for p in group["params"] if p not in matrices]} for group in groups]
        others = [group for group in others if group["params"]]
        moments: dict[str, Any] = {"betas": tuple(recipe.betas), "eps": recipe.eps}
        self.adamw = AdamW(others, lr=lr, fused=True, **moments) if others else None
        adamw = self.adamw.param_groups if self.adamw is not None else []
        super().__init__([*muon, *adamw] or groups, {"lr": lr})
        self._step_supports_amp_scaling = True
        self.muon_groups = self.param_groups[: len(muon)]
        self.momentum, self.nesterov = recipe.momentum, recipe.nesterov
        if self.adamw is not None:
            self.adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step on the gradients there are."""
        alike: dict[tuple[Any, ...], list[tuple[Tensor, Tensor, Tensor]]] = {}
        rates: dict[tuple[Any, ...], _Rates] = {}
        for group in self.muon_groups:
            (parameter,) = group["params"]
            if parameter.grad is None:
                continue
            views = _matrices(parameter, self.state[parameter]["momentum_buffer"], parameter.grad)
            # Groups of one share of the learning rate have the same, which may be a tensor: nobody looks into it here.
            kind = group["rate"], group["weight_decay"], parameter.device
            alike.setdefault((kind, views[0].shape, parameter.dtype), []).append(views)
            if kind not in rates:
                rates[kind] = _Rates(group["lr"], group["weight_decay"], self.found_inf, parameter.device)
        for (kind, *_), some in alike.items():
            matrices, buffers, gradients = (list(tensors) for tensors in zip(*some, strict=True))
            self._update(matrices, buffers, gradients, rates[kind])
        if self.adamw is not None:
            self.adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
            self.adamw.step()

    def _update(self, matrices: list[Tensor], buffers: list[Tensor], given: list[Tensor], rates: _Rates) -> None:
        """A step of matrices of one shape: each operation once for all of them."""
        gradients = torch.stack(given)
        if rates.bad is not None:  # a momentum drawn to itself stays
            gradients = torch.where(rates.bad, torch.stack(buffers), gradients)
        torch._foreach_lerp_(buffers, gradients.unbind(), 1 - self.momentum)
        update = torch.stack(buffers)
        update = orthogonal(gradients.lerp(update, self.momentum) if self.nesterov else update)
        torch._foreach_mul_(matrices, rates.keep)
        # What torch's fused SGD does: it takes a number or a tensor, and leaves the weights where the flag says so.
        updates = update.to(matrices[0].dtype).contiguous().unbind()
        lr: Any = rates.times(0.2 * math.sqrt(max(matrices[0].shape)))  # steps as long as AdamW's
        plain: dict[str, Any] = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "is_first_step": False}
        plain |= {"nesterov": False, "maximize": False, "found_inf": rates.flag}
        torch._fused_sgd_(matrices, updates, [], lr=lr, **plain)


class _Rates:
    """What the matrices of one rate and decay on one device have in common in a step.

    A tensor is computed with as Python computes with a number, in float64: both ways have the same bits.
    """

    def __init__(self, lr: float | Tensor, decay: float, flag: Tensor | None, device: torch.device) -> None:
        self.lr = lr.to(device, torch.float64, non_blocking=True) if isinstance(lr, Tensor) else lr
        self.flag = None if flag is None else flag.to(device, non_blocking=True)
        self.bad = None if self.flag is None else self.flag > 0
        keep: Any = 1 - self.lr * decay
        self.keep: Any = keep.float() if isinstance(keep, Tensor) else keep
        if self.bad is not None:
            self.keep = torch.where(self.bad, 1.0, self.keep)

    def times(self, length: float) -> float | Tensor:
        """The learning rate times a number."""
        product = length * self.lr
        return product.float() if isinstance(product, Tensor) else in_float32(product)


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


class LearningRates:
    """Sets the learning rates of an optimizer's groups: one number times each group's share, in float32.

    As Python's numbers, or as tensors that each step fills anew, for a step recorded as a CUDA graph reads them where
    they are. Both ways have the same bits.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device | None = None) -> None:
        """`device`: where to keep `tensors`, 0-dim and by the groups' share; without one the groups get numbers."""
        self.groups = optimizer.param_groups
        self.tensors: dict[float, Tensor] = {}
        if device is None:
            return
        for group in self.groups:
            if group["rate"] not in self.tensors:
                self.tensors[group["rate"]] = torch.zeros((), device=device)
            group["lr"] = self.tensors[group["rate"]]
        inner = optimizer.adamw if isinstance(optimizer, MuonAdamW) else optimizer
        if isinstance(inner, torch.optim.Adam):  # or AdamW: a recording asks for this, though a fused step always is
            inner._warned_capturable_if_run_uncaptured = True
            for group in inner.param_groups:
                group["capturable"] = True

    def set(self, lr: float) -> None:
        """For the next steps. Nothing waits: a number reaches a device with the kernel that fills."""
        for rate, tensor in self.tensors.items():
            tensor.fill_(in_float32(lr * rate))
        if not self.tensors:
            for group in self.groups:
                group["lr"] = in_float32(lr * group["rate"])


def in_float32(number: float) -> float:
    """The nearest number that float32 has."""
    return ctypes.c_float(number).value


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], recipe: OptimizerRecipe, roles: Roles = NO_ROLES
) -> list[dict[str, Any]]:
    """Groups of one weight decay and one share of the learning rate each (`rate`), of what trains.

    Normalisation layers and biases (all one-dimensional parameters) may decay differently.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    flat = recipe.weight_decay if recipe.norm_weight_decay is None else recipe.norm_weight_decay
    for name, p in parameters.items():
        if p.requires_grad:
            decay = flat if p.ndim <= 1 else recipe.weight_decay
            groups.setdefault((decay, roles.rates.get(name, 1.0)), []).append(p)
    rows = [{"params": some, "weight_decay": decay, "rate": rate} for (decay, rate), some in groups.items()]
    return rows or [{"params": [], "weight_decay": recipe.weight_decay, "rate": 1.0}]  # a stage without any


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], recipe: OptimizerRecipe, roles: Roles = NO_ROLES
) -> torch.optim.Optimizer:
    """The recipe's optimizer, its state complete before the first step; what is frozen has none.

    All of them take `found_inf`, a flag on the device, and then leave weights and state as they are: torch's in their
    fused form, the others by themselves. Momentum starts as zeros: fused SGD would leave it uninitialised if its first
    step were skipped as not finite.
    """
    groups = parameter_groups(parameters, recipe, roles)
    everything = [p for group in groups for p in group["params"]]
    if recipe.name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov, fused=True
        )
        return _started(optimizer, everything if recipe.momentum else [], [])
    if recipe.name == "muon":
        hidden = {parameters[name] for name in roles.matrices if name in parameters}
        return _started(MuonAdamW(groups, hidden, recipe), hidden, [p for p in everything if p not in hidden])
    kind = torch.optim.Adam if recipe.name == "adam" else torch.optim.AdamW
    optimizer = kind(groups, lr=recipe.lr, betas=(recipe.betas[0], recipe.betas[1]), eps=recipe.eps, fused=True)
    return _started(optimizer, [], everything)


def _started(
    optimizer: torch.optim.Optimizer, momentum: Iterable[nn.Parameter], moments: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """With the state of its first step: momentum for some parameters, Adam's two moments for others."""
    for p in momentum:
        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    for p in moments:
        optimizer.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        optimizer.state[p] |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's tensors as `parameter//key`."""
    return {
        f"{name}//{key}": value
        for name, p in parameters.items()
        if p in optimizer.state
        for key, value in optimizer.state[p].items()
    }

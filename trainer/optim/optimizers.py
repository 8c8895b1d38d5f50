"""The recipe's optimizer on the parameters that a rank has, and its state by their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.optim.lars import LARS
from trainer.optim.muon import MuonAdamW
from trainer.optim.trainable import Roles
from trainer.recipe import OptimizerRecipe

NO_ROLES = Roles()


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
    if recipe.name == "lars":
        return LARS(groups, recipe.lr, recipe.momentum, recipe.trust)
    if recipe.name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov, fused=True
        )
        return _started(optimizer, everything if recipe.momentum else [], [])
    beta1, beta2 = recipe.betas
    if recipe.name == "muon":
        hidden = {parameters[name] for name in roles.matrices if name in parameters}
        optimizer = MuonAdamW(groups, hidden, recipe.lr, recipe.momentum, recipe.nesterov, (beta1, beta2), recipe.eps)
        return _started(optimizer, hidden, [p for p in everything if p not in hidden])
    kind = torch.optim.Adam if recipe.name == "adam" else torch.optim.AdamW
    optimizer = kind(groups, lr=recipe.lr, betas=(beta1, beta2), eps=recipe.eps, fused=True)
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

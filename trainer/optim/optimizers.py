"""Construction of the recipe's optimizer and its state, from its row in `OPTIMIZERS`.

Every rank builds the optimizer for its own parameters. Checkpoints store the state by the names of
the parameters.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.optim.classes import create_optimizer, fill_state
from trainer.optim.muon import round_to_float32
from trainer.optim.trainable import Roles
from trainer.optim.verification import find_traits
from trainer.recipe import OptimizerRecipe

NO_ROLES = Roles()


class LearningRates:
    """Learning rates of an optimizer's parameter groups: a base rate times each group's `rate`.

    Learning rates are rounded to float32. They are Python numbers, or tensors for a step that is
    captured as a CUDA graph: a replay reads the tensors at their addresses, so `set` fills them in
    place. A tensor has exactly the same value as the corresponding number.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device | None = None,
    ) -> None:
        """Prepare to set the learning rates of `optimizer`.

        Args:
            optimizer: result of `build_optimizer`, whose groups have a `rate`.
            device: device for the learning rates as 0-dim tensors; None for Python numbers.
        """
        self.groups = optimizer.param_groups
        self.tensors: dict[float, Tensor] = {}
        if device is None:
            return
        for group in self.groups:
            rate = group["rate"]
            if rate not in self.tensors:
                self.tensors[rate] = torch.zeros((), device=device)
            group["lr"] = self.tensors[rate]
            # Torch requires `capturable` to capture a step. On a CPU, it refuses this option for
            # optimizers that are not fused.
            if "capturable" in group:
                group["capturable"] = bool(group.get("fused")) or device.type == "cuda"

    def set(self, lr: float) -> None:
        """Set the base learning rate of the next steps.

        The host does not wait for the device, because a tensor is filled by a kernel that gets the
        number as an argument.
        """
        for rate, tensor in self.tensors.items():
            tensor.fill_(round_to_float32(lr * rate))
        if not self.tensors:
            for group in self.groups:
                group["lr"] = round_to_float32(lr * group["rate"])


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    recipe: OptimizerRecipe,
    roles: Roles = NO_ROLES,
    state: Mapping[Tensor, dict[str, Any]] = {},
) -> torch.optim.Optimizer:
    """Build the recipe's optimizer with its state complete before the first step.

    Torch creates the state in the first step, but a resumed run must restore it before that. If
    the attribute `found_inf` of the optimizer, a flag on the device, is set, a step changes neither
    weights nor state.

    The optimizer has the parameters that train or have a `state`. All parameters of a group have
    the same weight decay and the same factor of the learning rate, `rate`. For one-dimensional
    parameters (normalization layers and biases), the recipe may set the weight decay
    `norm_weight_decay`.

    Args:
        parameters: the parameters of this rank, by name.
        recipe: the optimizer section of the recipe.
        roles: roles of the parameters in the whole model.
        state: state of an earlier optimizer. A parameter with an empty state starts with zeros. A
            frozen parameter that is not in `state` does not get a state.
    """
    parameters_by_kind: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, p in parameters.items():
        if p.requires_grad or p in state:
            decay = recipe.weight_decay
            if p.ndim <= 1 and recipe.norm_weight_decay is not None:
                decay = recipe.norm_weight_decay
            rate = roles.rates.get(name, 1.0)
            parameters_by_kind.setdefault((decay, rate), []).append(p)
    # torch's optimizers refuse an empty list, which a pipeline stage without parameters would have.
    if not parameters_by_kind:
        parameters_by_kind[recipe.weight_decay, 1.0] = []
    groups = [
        {"params": group, "weight_decay": decay, "rate": rate}
        for (decay, rate), group in parameters_by_kind.items()
    ]
    row = find_traits(recipe)
    options: dict[str, Any] = {}
    if row.fused:
        options["fused"] = True
    # Without this option, torch's classes read the number of steps from a GPU in every step.
    if row.capturable and any(p.is_cuda for p in parameters.values()):
        options["capturable"] = True
    matrices = set()
    if row.matrix_state:
        matrices = {parameters[name] for name in roles.matrices if name in parameters}
        options["matrices"] = matrices
    optimizer = create_optimizer(recipe, groups, **options)
    optimizer.state |= state
    fill_state(optimizer, row, recipe.momentum, matrices)
    if not row.fused:
        undo_failed_steps(optimizer)
    return optimizer


def undo_failed_steps(optimizer: torch.optim.Optimizer) -> None:
    """Make steps of `optimizer` change nothing if `found_inf` is set, as steps of fused optimizers.

    Each step runs. If the flag is set, the changes are then undone on the device, so the host does
    not wait for the flag. A step therefore needs memory for a second copy of weights and state.

    A step that counts on the host cannot be undone there without waiting for a GPU. In fp16,
    GradScaler then waits for the flag, and calls `step` only if it is not set. In other precisions
    the flag ends the run, so that its counters no longer matter.
    """
    copies: list[tuple[Tensor, Tensor]] = []
    flags: dict[str, Any] = {}
    is_on_host = False
    for p, state in optimizer.state.items():
        for tensor in state.values():
            is_on_host = is_on_host or tensor.device != p.device

    def copy(*_: object) -> None:
        # Some classes refuse to step while they have these attributes.
        for name in ("found_inf", "grad_scale"):
            if name in vars(optimizer):
                flags[name] = vars(optimizer).pop(name)
        if flags.get("found_inf") is None:
            return
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state.get(p, {})
                for tensor in (p.detach(), *state.values()):
                    if tensor.device == p.device:
                        copies.append((tensor, tensor.clone()))

    def restore(*_: object) -> None:
        for tensor, before in copies:
            is_bad = flags["found_inf"].to(tensor.device, non_blocking=True) > 0
            # Unlike `copy_`, this writes nothing if the flag is not set. Under Hogwild, writing
            # would lose updates by other workers.
            tensor.masked_scatter_(is_bad, before)
        copies.clear()
        vars(optimizer).update(flags)
        flags.clear()

    # With this attribute, GradScaler sets `found_inf`. Without it, GradScaler reads the flag, and
    # the host waits for the device.
    optimizer._step_supports_amp_scaling = not is_on_host  # type: ignore[attr-defined]
    optimizer.register_step_pre_hook(copy)
    optimizer.register_step_post_hook(restore)


def name_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return the tensors of the optimizer's state, by names of the form `parameter//key`."""
    tensors = {}
    for name, p in parameters.items():
        if p in optimizer.state:
            for key, value in optimizer.state[p].items():
                tensors[f"{name}//{key}"] = value
    return tensors

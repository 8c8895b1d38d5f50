"""Update of the weights: learning rate, finite check, fp16 loss scaling, moving average.

The training loop calls `build_learning_rate` and `MovingAverage`, and `training.steps` calls
`Updater`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainer.distributed.matrix_exchange import MatrixExchange
from trainer.errors import RecipeError
from trainer.optim.optimizers import NO_ROLES, build_optimizer
from trainer.optim.trainable import Roles
from trainer.recipe import Recipe
from trainer.recipe.schedule_table import LR_SCHEDULES

# Loss scale below which training in fp16 has failed. GradScaler starts at 2**16, and an ordinary
# overflow does not halve the scale 26 times in a row.
MIN_SCALE = 2.0**-10


def count_total_steps(recipe: Recipe, steps_per_epoch: int) -> int:
    """Return the number of optimizer steps of the whole run."""
    steps = recipe.epochs * steps_per_epoch
    return min(steps, recipe.max_steps or steps)


def build_learning_rate(recipe: Recipe, steps_per_epoch: int, total: int) -> Callable[[int], float]:
    """Build the learning rate as a pure function of the optimizer step, counted from 0.

    The values equal those of torch's chained schedulers: a linear warm-up, then the schedule of the
    recipe. At a restart, a cosine begins again at the peak rate (Loshchilov and Hutter,
    arXiv:1608.03983).

    Args:
        recipe: the recipe with the schedule.
        steps_per_epoch: number of optimizer steps in an epoch.
        total: number of steps of the schedule.

    Returns:
        A function that returns the learning rate of a step.
    """
    schedule = recipe.schedule
    peak_lr = recipe.peak_lr
    lr_after_warmup = LR_SCHEDULES[schedule.name].formula
    warmup = round(schedule.warmup_epochs * steps_per_epoch)
    factor = schedule.warmup_factor
    bounds = [warmup]
    for restart_epochs in schedule.restarts:
        restart = round(restart_epochs * steps_per_epoch)
        if warmup < restart < total:
            bounds.append(restart)
    bounds.append(max(total, warmup + 1))
    cycles = [*pairwise(bounds)]
    cycles.reverse()

    def compute_lr(step: int) -> float:
        if step < warmup:
            return peak_lr * (factor + (1 - factor) * step / warmup)
        start, stop = next(cycle for cycle in cycles if step >= cycle[0])
        fraction = min(1.0, (step - start) / (stop - start))
        epochs = (step - warmup) // steps_per_epoch
        lr = float(lr_after_warmup(fraction, epochs, peak_lr, schedule))
        if not 0 <= lr < math.inf:
            raise RecipeError(
                f"schedule.name={schedule.name} returns the learning rate {lr} for step {step}: it "
                "must be 0 or more, and finite"
            )
        return lr

    return compute_lr


def build_loss_scaler(
    recipe: Recipe,
    device: torch.device,
) -> torch.amp.GradScaler | None:
    """Return a scaler that keeps small fp16 gradients from becoming 0; None in other precisions."""
    if recipe.precision == "fp16":
        return torch.amp.GradScaler(device.type)
    return None


class GradientExchange(Protocol):
    """Operations on the gradient of the whole model, which may be divided over ranks.

    The strategies of `trainer.modes` implement them.

    Attributes:
        matrices: exchange of the rows of weight matrices; None if each weight is whole on a rank.
    """

    matrices: MatrixExchange | None

    def grad_norm(self) -> Tensor:
        """Compute the 2-norm of the whole model's gradient, 0-dim, on the device."""

    def reduce_overflow(self, flag: Tensor) -> None:
        """Replace `flag`, 0-dim, by its maximum over all ranks that have a part of the model."""


class _DeviceGroup(NamedTuple):
    """Parameters on one device, and the arguments of torch's finite check for them.

    Attributes:
        parameters: the parameters.
        flag: becomes 1 if a gradient is not finite, 0-dim.
        scale: always 1, 0-dim. torch's check also multiplies the gradients by the inverse of a loss
            scale, but without fp16 the loss is not scaled.
    """

    parameters: list[nn.Parameter]
    flag: Tensor
    scale: Tensor


class Updater:
    """Update of the weights: finite check or fp16 scaler, clipping, optimizer step.

    Only the method `is_bad` waits for the device. The flag `bad`, a tensor on the device, is never
    reset: after the first gradient that is not finite, the optimizer skips every update, so the
    weights keep their last good values. In fp16, gradients do not set the flag, because an overflow
    is ordinary: the scaler lowers its scale and skips one step. Training in fp16 has failed if the
    loss is not finite, which sets the flag, or if the scale is below `MIN_SCALE`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        device: torch.device,
        scaler: torch.amp.GradScaler | None,
        roles: Roles = NO_ROLES,
    ) -> None:
        """Prepare the update of the parameters of `optimizer`.

        Args:
            optimizer: result of `build_optimizer`.
            recipe: the whole recipe.
            device: device of the flag `bad`.
            scaler: result of `build_loss_scaler`, which also scales the losses.
            roles: roles of the parameters in the whole model.
        """
        self.recipe = recipe
        self.roles = roles
        self.limit = recipe.clip_grad_norm
        self.scaler = scaler
        self.bad = torch.zeros((), device=device)
        # Parameters that do not train in this epoch, by name.
        self.frozen: dict[str, nn.Parameter] = {}
        self._set_optimizer(optimizer)
        if scaler:
            # The scaler creates its state in the first call of `scale`. A rank without a loss would
            # never call it, so it is called here, and the result is not used.
            scaler.scale(self.bad)

    def _set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters = []
        for group in optimizer.param_groups:
            self.parameters += group["params"]
        # A split model has parameters on several devices. Each device has its own flag, and in each
        # step `bad` becomes the maximum of all flags.
        self.device_groups: dict[torch.device, _DeviceGroup] = {}
        for p in self.parameters:
            if p.device not in self.device_groups:
                flag = self.bad
                if p.device != self.bad.device:
                    flag = torch.zeros((), device=p.device)
                scale = torch.ones((), device=p.device)
                self.device_groups[p.device] = _DeviceGroup([], flag, scale)
            self.device_groups[p.device].parameters.append(p)

    def follow(
        self,
        parameters: Mapping[str, nn.Parameter],
        also: Collection[str] = (),
    ) -> None:
        """Replace the optimizer by one that trains those of `parameters` that require gradients.

        The new optimizer takes over the state of the present one, and also keeps frozen parameters
        that have a state. Like every optimizer of torch, it does not update parameters without a
        gradient.

        Args:
            parameters: all parameters of this rank, by name.
            also: names of the parameters that have a state in a checkpoint.
        """
        state: dict[Tensor, Any] = {p: {} for name, p in parameters.items() if name in also}
        state |= self.optimizer.state
        self._set_optimizer(build_optimizer(parameters, self.recipe.optimizer, self.roles, state))
        self.frozen = {name: p for name, p in parameters.items() if not p.requires_grad}

    def zero_grad(self) -> None:
        """Set all gradients to None, including those of frozen parameters."""
        for parameter in (*self.parameters, *self.frozen.values()):
            parameter.grad = None

    def step(
        self,
        loss: Tensor,
        exchange: GradientExchange,
        want_norm: bool,
    ) -> Tensor | None:
        """Take one optimizer step with the current gradients.

        Args:
            loss: loss of this step, 0-dim. In fp16, a loss that is not finite sets `bad`. In all
                other precisions, a gradient that is not finite does.
            exchange: operations on the gradient of the whole model.
            want_norm: whether to compute the norm even if the recipe does not clip it.

        Returns:
            The norm of the gradient before clipping, or None if it was not computed.

        Raises:
            RecipeError: the model has unfrozen a parameter since the epoch began. The weights are
                unchanged.
        """
        for name, parameter in self.frozen.items():
            if parameter.grad is not None:
                raise RecipeError(
                    f"model.name={self.recipe.model.name} unfreezes {name} within an epoch: change "
                    "requires_grad in the model's train(), which is called when an epoch begins"
                )
        if self.scaler is None:
            for group in self.device_groups.values():
                gradients = [p.grad for p in group.parameters if p.grad is not None]
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, group.flag, group.scale)
            _merge_flags(self.bad, [group.flag for group in self.device_groups.values()])
            exchange.reduce_overflow(self.bad)
            self.optimizer.found_inf = self.bad  # type: ignore[attr-defined]
        else:
            is_bad_loss = 1 - torch.isfinite(loss).float()
            # The flag is updated in place, because a captured CUDA graph reads it at this address
            # (see `step_graphs`).
            self.bad.copy_(torch.maximum(self.bad, is_bad_loss))
            self.scaler.unscale_(self.optimizer)
            flags: dict[Any, Tensor] = self.scaler._found_inf_per_device(self.optimizer)
            # A pipeline stage whose parameters are all frozen has neither gradients nor flags, but
            # must take part in the exchange of flags.
            if not flags:
                flags[self.bad.device] = torch.zeros_like(self.bad)
            first, *others = flags.values()
            _merge_flags(first, others)
            # torch adds the flags of all devices, and a fused optimizer skips its update only if
            # the sum is 1. So all flags except the first, which is their maximum, become 0.
            for flag in others:
                flag.zero_()
            exchange.reduce_overflow(first)
        norm = None
        if want_norm or self.limit is not None:
            norm = exchange.grad_norm()
        if self.limit is not None and norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.limit, norm)
        self.optimizer.exchange = exchange.matrices  # type: ignore[attr-defined]
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return norm

    def is_bad(self) -> bool:
        """Return whether training has failed. Waits for the device."""
        if self.bad.item():
            return True
        return self.scaler is not None and self.scaler.get_scale() < MIN_SCALE

    def state(self) -> dict[str, Tensor]:
        """Return the scaler's own tensors by name; empty unless the precision is fp16."""
        if self.scaler is None:
            return {}
        scale = self.scaler._scale
        growth = self.scaler._growth_tracker
        assert scale is not None and growth is not None
        return {"scale": scale, "growth": growth}


def _merge_flags(flag: Tensor, others: Iterable[Tensor]) -> None:
    """Set `flag` to the maximum of all flags, which may be on several devices."""
    for other in others:
        if other is not flag:
            moved = other.to(flag.device, non_blocking=True)
            flag.copy_(torch.maximum(flag, moved))


class MovingAverage:
    """Exponential moving average of weights and float buffers, by their names in the user's model.

    The decay after n steps is the smaller of `decay` and (1 + n) / (10 + n), so that the initial
    weights have little influence in short runs.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        decay: float,
    ) -> None:
        self.live = dict(tensors)
        self.decay = decay
        self.average = {}
        # Names of floating-point tensors, which are averaged, and of integer tensors (counters),
        # which are copied.
        self._floats = []
        self._integers = []
        for name, tensor in tensors.items():
            self.average[name] = tensor.detach().clone()
            if tensor.is_floating_point():
                self._floats.append(name)
            else:
                self._integers.append(name)

    def update(self, step: int) -> None:
        """Add the weights after `step` optimizer steps to the average."""
        decay = min(self.decay, (1 + step) / (10 + step))
        update_averages = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        averages = [self.average[name] for name in self._floats]
        weights = [self.live[name] for name in self._floats]
        with torch.no_grad():
            update_averages(averages, weights, step)

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by name. Integer tensors (counters) are copies of current values."""
        for name in self._integers:
            self.average[name].copy_(self.live[name])
        return self.average

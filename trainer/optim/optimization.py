"""What happens to gradients and weights: learning rate, finite check, fp16 scaling, moving average.

The loop asks for the learning rate and feeds the average; `training.step_graphs.Steps` calls the `Updater`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainer.modes.base import Strategy
from trainer.recipe import Recipe
from trainer.recipe.schema import ScheduleRecipe

LOWEST_SCALE = 2.0**-10  # of fp16's loss: 26 halvings in a row are more than an overflow


def total_steps(recipe: Recipe, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run."""
    return min(recipe.epochs * steps_per_epoch, recipe.max_steps or recipe.epochs * steps_per_epoch)


def _constant(done: float, epochs: int, top: float, schedule: ScheduleRecipe) -> float:
    return top


def _cosine(done: float, epochs: int, top: float, schedule: ScheduleRecipe) -> float:
    """To `min_lr` at the run's end (Loshchilov and Hutter, arXiv:1608.03983)."""
    return schedule.min_lr + (top - schedule.min_lr) * (1 + math.cos(math.pi * done)) / 2


def _step(done: float, epochs: int, top: float, schedule: ScheduleRecipe) -> float:
    """A multiplication by gamma every `step_epochs` epochs, as in torchvision's reference recipes."""
    return top * float(schedule.gamma ** (epochs // schedule.step_epochs))


# The learning rate after warm-up, from the share of the remaining steps that is done (up to 1), whole epochs since the
# warm-up, and the highest rate. Their names are those of `ScheduleRecipe.name`.
LR_SCHEDULES = {"constant": _constant, "cosine": _cosine, "step": _step}


def learning_rate(recipe: Recipe, steps_per_epoch: int, total: int | None = None) -> Callable[[int], float]:
    """The learning rate as a pure function of the optimizer step (from 0), equal to torch's chained schedulers: a
    linear warm-up, then the recipe's schedule; a cosine that begins anew does so at the highest rate, as in its paper.

    `total`: steps of the schedule, where the recipe alone does not tell.
    """
    schedule, top, after = recipe.schedule, recipe.peak_lr, LR_SCHEDULES[recipe.schedule.name]
    warmup, factor = round(schedule.warmup_epochs * steps_per_epoch), schedule.warmup_factor
    end = total_steps(recipe, steps_per_epoch) if total is None else total
    restarts = [round(epochs * steps_per_epoch) for epochs in schedule.restarts]
    bounds = [warmup, *(step for step in restarts if warmup < step < end), max(end, warmup + 1)]
    parts = [*pairwise(bounds)][::-1]

    def rate(step: int) -> float:
        if step < warmup:
            return top * (factor + (1 - factor) * step / warmup)
        begun, over = next(part for part in parts if step >= part[0])
        done = min(1.0, (step - begun) / (over - begun))
        return after(done, (step - warmup) // steps_per_epoch, top, schedule)

    return rate


def loss_scaler(recipe: Recipe, device: torch.device) -> torch.amp.GradScaler | None:
    """What keeps fp16's small gradients above zero; None in other precisions."""
    return torch.amp.GradScaler(device.type) if recipe.precision == "fp16" else None


class Updater:
    """Applies gradients: finite check or fp16 scaler, clipping, optimizer step. Nothing here waits for the device.

    `bad` is a sticky flag on the device: from the first gradient that is not finite on, optimizers skip every
    update, so the weights stay as they were before it. In fp16 an overflow is ordinary (the scaler lowers its scale and
    skips that one step); bad is a loss that is not finite, or a scale that has sunk to nothing.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        device: torch.device,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        """`scaler` is the one that scales losses; see `loss_scaler`."""
        self.optimizer, self.limit, self.scaler = optimizer, recipe.clip_grad_norm, scaler
        self.bad = torch.zeros((), device=device)
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # A split model has parameters on several devices: a flag each, and `bad` is their maximum. A scale of 1.
        self.parts = [
            (
                [p for p in self.parameters if p.device == where],
                self.bad if where == device else torch.zeros((), device=where),
                torch.ones((), device=where),
            )
            for where in dict.fromkeys(p.device for p in self.parameters)
        ]
        if scaler is not None:
            scaler.scale(self.bad)  # its state exists from here on, on ranks without a loss too

    def step(self, loss: Tensor, strategy: Strategy, want_norm: bool) -> Tensor | None:
        """One optimizer step on the gradients there are.

        Args:
            loss: this step's, 0-dim; in fp16 it shows what is bad, in other precisions the gradients do.
            strategy: gives the whole model's gradient norm and spreads flags over its parts.
            want_norm: compute the norm although nothing is clipped.

        Returns:
            The gradient's norm before clipping, where it was computed.
        """
        if self.scaler is None:
            for parameters, flag, scale in self.parts:
                gradients = [p.grad for p in parameters if p.grad is not None]
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, scale)
            _merge(self.bad, (flag for _, flag, _ in self.parts))
            strategy.reduce_overflow(self.bad)
            self.optimizer.found_inf = self.bad  # type: ignore[attr-defined]
        else:
            self.bad.copy_(torch.maximum(self.bad, 1 - torch.isfinite(loss).float()))  # in place: see `step_graphs`
            self.scaler.unscale_(self.optimizer)
            flags: dict[Any, Tensor] = self.scaler._found_inf_per_device(self.optimizer)
            if not flags:  # a stage that is frozen
                flags[self.bad.device] = torch.zeros_like(self.bad)
            first, *others = flags.values()
            _merge(first, others)
            for flag in others:  # torch adds them up, and a sum of two would be no overflow to a fused optimizer
                flag.zero_()
            strategy.reduce_overflow(first)
        norm = strategy.grad_norm() if want_norm or self.limit is not None else None
        if self.limit is not None and norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.limit, norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return norm

    def is_bad(self) -> bool:
        """Whether training has failed; waits for the device."""
        return bool(self.bad.item()) or (self.scaler is not None and self.scaler.get_scale() < LOWEST_SCALE)

    def state(self) -> dict[str, Tensor]:
        """The scaler's live tensors, empty in other precisions than fp16."""
        if self.scaler is None:
            return {}
        scale, growth = self.scaler._scale, self.scaler._growth_tracker
        assert scale is not None and growth is not None
        return {"scale": scale, "growth": growth}


def _merge(flag: Tensor, others: Iterable[Tensor]) -> None:
    """Make `flag` the maximum of all, wherever they are."""
    for other in others:
        if other is not flag:
            flag.copy_(torch.maximum(flag, other.to(flag.device, non_blocking=True)))


class MovingAverage:
    """Exponential moving average of weights and float buffers, under plain names.

    The decay rises as (1 + n) / (10 + n) up to the recipe's, so that short runs do not average their starting weights.
    """

    def __init__(self, tensors: Mapping[str, Tensor], decay: float) -> None:
        self.live = dict(tensors)
        self.decay = decay
        self.average = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._floats = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
        self._others = [name for name, tensor in tensors.items() if not tensor.is_floating_point()]

    def update(self, step: int) -> None:
        """Take in the weights after `step` optimizer steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            average([self.average[n] for n in self._floats], [self.live[n] for n in self._floats], step)

    def tensors(self) -> dict[str, Tensor]:
        """The averages, with the live value of what cannot be averaged (counters)."""
        for name in self._others:
            self.average[name].copy_(self.live[name])
        return self.average

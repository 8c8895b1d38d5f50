"""Table of the learning-rate schedules: the formula of each, and the keys that it reads.

To add a schedule, add a row here, and a function for its formula. A test compares each formula with
torch's scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.recipe.known_names import Registry

if TYPE_CHECKING:
    from trainer.recipe.schema import ScheduleRecipe

Formula = Callable[[float, int, float, "ScheduleRecipe"], float]


@dataclass(frozen=True)
class ScheduleTraits:
    """Properties of a learning-rate schedule.

    Attributes:
        formula: function that returns the learning rate after the warm-up. The arguments are the
            finished fraction of the steps (0 to 1, from 0 again after each `schedule.restart`), the
            number of whole epochs since the warm-up, the highest learning rate, and the recipe's
            section `schedule`.
        keys: keys of the section `schedule` that this schedule reads but some other schedules do
            not. If `restart` is among them, the schedule can restart at the highest learning rate.
        waits: True if the rate also falls when the task's metric has not improved for more than
            `schedule.patience` epochs, see `trainer.training.stopping.lower_rate`.
    """

    formula: Formula
    keys: tuple[str, ...] = ()
    waits: bool = False


def _constant(fraction: float, epochs: int, peak_lr: float, schedule: ScheduleRecipe) -> float:
    return peak_lr


def _cosine(fraction: float, epochs: int, peak_lr: float, schedule: ScheduleRecipe) -> float:
    """Decay to `min_lr` along a cosine (Loshchilov and Hutter, arXiv:1608.03983)."""
    height = 1 + math.cos(math.pi * fraction)
    return schedule.min_lr + (peak_lr - schedule.min_lr) * height / 2


def _step(fraction: float, epochs: int, peak_lr: float, schedule: ScheduleRecipe) -> float:
    """Multiply by `gamma` every `step_epochs` epochs, as torchvision's reference recipes do."""
    return peak_lr * float(schedule.gamma ** (epochs // schedule.step_epochs))


def _exponential(fraction: float, epochs: int, peak_lr: float, schedule: ScheduleRecipe) -> float:
    """Multiply by `gamma` every epoch."""
    return peak_lr * float(schedule.gamma**epochs)


def _polynomial(fraction: float, epochs: int, peak_lr: float, schedule: ScheduleRecipe) -> float:
    """Decay to `min_lr` along a power of the remaining fraction, as torch's `PolynomialLR`."""
    return schedule.min_lr + (peak_lr - schedule.min_lr) * float((1 - fraction) ** schedule.power)


LR_SCHEDULES = Registry[ScheduleTraits](
    "register_schedule",
    {
        "constant": ScheduleTraits(_constant),
        "cosine": ScheduleTraits(_cosine, keys=("min_lr", "restart")),
        "step": ScheduleTraits(_step, keys=("step_epochs", "gamma")),
        "exponential": ScheduleTraits(_exponential, keys=("gamma",)),
        "polynomial": ScheduleTraits(_polynomial, keys=("min_lr", "restart", "power")),
        "plateau": ScheduleTraits(_constant, keys=("min_lr", "gamma", "patience"), waits=True),
    },
)
# Keys that the schedules of users read. Their names are not known before their module is imported.
OWN_KEYS = ("min_lr", "step_epochs", "gamma", "power")

"""Table of the learning-rate schedules: the formula of each, and the keys that it reads.

To add a schedule, add a row here, and a function for its formula. A test compares each formula with
torch's scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.recipe.schema import ScheduleRecipe


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
    """

    formula: Callable[[float, int, float, ScheduleRecipe], float]
    keys: tuple[str, ...] = ()


def _cosine(fraction: float, epochs: int, peak_lr: float, schedule: ScheduleRecipe) -> float:
    """Decay to `min_lr` along a cosine (Loshchilov and Hutter, arXiv:1608.03983)."""
    height = 1 + math.cos(math.pi * fraction)
    return schedule.min_lr + (peak_lr - schedule.min_lr) * height / 2


def _step(fraction: float, epochs: int, peak_lr: float, schedule: ScheduleRecipe) -> float:
    """Multiply by `gamma` every `step_epochs` epochs, as torchvision's reference recipes do."""
    return peak_lr * float(schedule.gamma ** (epochs // schedule.step_epochs))


LR_SCHEDULES = {
    "constant": ScheduleTraits(lambda fraction, epochs, peak_lr, schedule: peak_lr),
    "cosine": ScheduleTraits(_cosine, keys=("min_lr", "restart")),
    "step": ScheduleTraits(_step, keys=("step_epochs", "gamma")),
}

"""Optimizers, learning rate schedule, fp16 loss scaling, moving average, and parameter roles.

Imports: errors, recipe, devices, distributed, models.
"""

from trainer.optim.classes import register_optimizer, register_schedule

__all__ = ["register_optimizer", "register_schedule"]

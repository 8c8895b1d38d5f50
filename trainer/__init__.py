"""Train an image model under any way of using several devices, and measure each honestly.

    from trainer import load_recipe, train
    result = train(load_recipe("digits", "optimizer.lr=0.05", epochs=1))

Names are resolved on first use, so that importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.comparison import compare as compare
    from trainer.data import register_dataset as register_dataset
    from trainer.inference import predict as predict
    from trainer.models.zoo import register_model as register_model
    from trainer.planning import plan as plan
    from trainer.pool import DevicePool as DevicePool
    from trainer.pool import ItemError as ItemError
    from trainer.pool import current_device as current_device
    from trainer.recipe import Recipe as Recipe
    from trainer.recipe import load as load_recipe  # noqa: F401
    from trainer.tasks import Classification as Classification
    from trainer.tasks import Task as Task
    from trainer.tasks import register_task as register_task
    from trainer.training.loop import train as train
    from trainer.training.trained import evaluate_run as evaluate  # noqa: F401

__version__ = "0.1.0"

_HOME = {
    "Recipe": ("trainer.recipe", "Recipe"),
    "load_recipe": ("trainer.recipe", "load"),
    "train": ("trainer.training.loop", "train"),
    "plan": ("trainer.planning", "plan"),
    "compare": ("trainer.comparison", "compare"),
    "evaluate": ("trainer.training.trained", "evaluate_run"),
    "predict": ("trainer.inference", "predict"),
    "register_model": ("trainer.models.zoo", "register_model"),
    "register_dataset": ("trainer.data", "register_dataset"),
    "register_task": ("trainer.tasks", "register_task"),
    "Task": ("trainer.tasks", "Task"),
    "Classification": ("trainer.tasks", "Classification"),
    "DevicePool": ("trainer.pool", "DevicePool"),
    "ItemError": ("trainer.pool", "ItemError"),
    "current_device": ("trainer.pool", "current_device"),
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trainer' has no attribute '{name}'")
    module, attribute = _HOME[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

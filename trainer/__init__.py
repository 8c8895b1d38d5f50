"""Train an image model under any way of using several devices, and measure each honestly.

    from trainer import train
    result = train("digits", epochs=2)
    result = train(model=net, data=(train_set, val_set), epochs=5)
    labels = load("runs/first").predict(["cat.jpg", "dog.jpg"])

Names are resolved on first use, so that importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer import errors

if TYPE_CHECKING:
    from trainer.commands.compare import compare
    from trainer.commands.evaluate import evaluate_run as evaluate
    from trainer.commands.loaded_model import LoadedModel, Prediction, load
    from trainer.commands.plan import plan
    from trainer.commands.predict import predict
    from trainer.data import register_dataset
    from trainer.models.zoo import register_model
    from trainer.pool import DevicePool, ItemError, current_device
    from trainer.recipe import Recipe
    from trainer.recipe import load as load_recipe
    from trainer.tasks import Classification, Task, register_task
    from trainer.training.api import train
    from trainer.training.callbacks import EpochReport
    from trainer.training.results import Result

    __version__: str

__all__ = [
    "Classification",
    "DevicePool",
    "EpochReport",
    "ItemError",
    "LoadedModel",
    "Prediction",
    "Recipe",
    "Result",
    "Task",
    "compare",
    "current_device",
    "errors",
    "evaluate",
    "load",
    "load_recipe",
    "plan",
    "predict",
    "register_dataset",
    "register_model",
    "register_task",
    "train",
]

_HOME = {
    "__version__": ("trainer.recipe.versions", "VERSION"),
    "Recipe": ("trainer.recipe", "Recipe"),
    "load_recipe": ("trainer.recipe", "load"),
    "train": ("trainer.training.api", "train"),
    "Result": ("trainer.training.results", "Result"),
    "EpochReport": ("trainer.training.callbacks", "EpochReport"),
    "plan": ("trainer.commands.plan", "plan"),
    "compare": ("trainer.commands.compare", "compare"),
    "evaluate": ("trainer.commands.evaluate", "evaluate_run"),
    "predict": ("trainer.commands.predict", "predict"),
    "load": ("trainer.commands.loaded_model", "load"),
    "LoadedModel": ("trainer.commands.loaded_model", "LoadedModel"),
    "Prediction": ("trainer.commands.loaded_model", "Prediction"),
    "register_model": ("trainer.models.zoo", "register_model"),
    "register_dataset": ("trainer.data", "register_dataset"),
    "register_task": ("trainer.tasks", "register_task"),
    "Task": ("trainer.tasks", "Task"),
    "Classification": ("trainer.tasks", "Classification"),
    "DevicePool": ("trainer.pool", "DevicePool"),
    "ItemError": ("trainer.pool", "ItemError"),
    "current_device": ("trainer.pool", "current_device"),
}


if not TYPE_CHECKING:  # a type checker would take every name for one that is here

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'trainer' has no attribute '{name}'")
        module, attribute = _HOME[name]
        return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

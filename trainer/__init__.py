"""Train an image model on one or several devices in any parallel mode, and measure each mode.

    from trainer import load, train
    result = train("digits", epochs=2)
    result = train(model=net, data=(train_set, val_set), epochs=5)
    labels = load("runs/first").predict(["cat.jpg", "dog.jpg"])

The public names are imported on first use, so that importing this package does not import torch.
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
    from trainer.commands.predict.python_api import predict
    from trainer.data import register_dataset
    from trainer.models.zoo import register_model
    from trainer.optim import register_optimizer, register_schedule
    from trainer.pool import DevicePool, ItemError, current_device
    from trainer.recipe import Recipe
    from trainer.recipe import load as load_recipe
    from trainer.tasks import Classification, Task, register_metric, register_task
    from trainer.training.api import train
    from trainer.training.callbacks import EpochReport, EvaluationReport, StepReport
    from trainer.training.results import Result

    __version__: str

__all__ = [
    "Classification",
    "DevicePool",
    "EpochReport",
    "EvaluationReport",
    "ItemError",
    "LoadedModel",
    "Prediction",
    "Recipe",
    "Result",
    "StepReport",
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
    "register_metric",
    "register_model",
    "register_optimizer",
    "register_schedule",
    "register_task",
    "train",
]

_HOME = {
    "__version__": "trainer.versions",
    "Recipe": "trainer.recipe",
    "load_recipe": "trainer.recipe",
    "train": "trainer.training.api",
    "Result": "trainer.training.results",
    "EpochReport": "trainer.training.callbacks",
    "EvaluationReport": "trainer.training.callbacks",
    "StepReport": "trainer.training.callbacks",
    "plan": "trainer.commands.plan",
    "compare": "trainer.commands.compare",
    "evaluate": "trainer.commands.evaluate",
    "predict": "trainer.commands.predict.python_api",
    "load": "trainer.commands.loaded_model",
    "LoadedModel": "trainer.commands.loaded_model",
    "Prediction": "trainer.commands.loaded_model",
    "register_model": "trainer.models.zoo",
    "register_dataset": "trainer.data",
    "register_metric": "trainer.tasks",
    "register_optimizer": "trainer.optim",
    "register_schedule": "trainer.optim",
    "register_task": "trainer.tasks",
    "Task": "trainer.tasks",
    "Classification": "trainer.tasks",
    "DevicePool": "trainer.pool",
    "ItemError": "trainer.pool",
    "current_device": "trainer.pool",
}
# Public name -> name in the module that defines the object, if the two names differ.
_ALIASES = {"__version__": "VERSION", "load_recipe": "load", "evaluate": "evaluate_run"}


# `__getattr__` is hidden from type checkers: they accept any name, even a misspelled one, of a
# module that defines it.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'trainer' has no attribute '{name}'")
        return getattr(import_module(_HOME[name]), _ALIASES.get(name, name))


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

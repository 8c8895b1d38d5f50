"""Checks of a DevicePool's arguments, before anything starts."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from trainer.devices import cards
from trainer.errors import RecipeError, SetupError
from trainer.processes import pickling

MOVE = "move what does not pickle to the top of a module, undecorate it, or use flavour='thread'"


def check_devices(devices: Sequence[str | torch.device]) -> list[torch.device]:
    """Devices by name. Raises RecipeError for what names none, SetupError for one that this machine lacks."""
    if isinstance(devices, str | torch.device) or not devices:
        raise RecipeError(f"devices={devices!r} of a DevicePool: give a list, as ['cuda:0', 'cpu'], one worker each")
    checked = []
    for name in devices:
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError) as error:
            raise RecipeError(f"device {name!r}: {str(error).splitlines()[0]}: use 'cpu' or 'cuda:0'") from None
        if device.type == "cuda" and (device.index or 0) >= (here := cards.detect()).count:
            raise here.fault or SetupError(f"device {name} is not here: this machine has {here.count} CUDA devices")
        checked.append(torch.device("cuda", device.index or 0) if device.type == "cuda" else device)
    return checked


def check_worker(worker: Any, arguments: Sequence[Any]) -> None:
    """Raises RecipeError unless a pool can call it."""
    name = getattr(worker, "__qualname__", repr(worker))
    if isinstance(worker, type):
        if not any(method in vars(base) for base in worker.__mro__ for method in ("__call__", "batch")):
            raise RecipeError(f"worker {name} has neither __call__(self, item) nor batch(self, items): give it one")
    elif not callable(worker) and not hasattr(worker, "batch"):
        raise RecipeError(f"worker {name} is no class and no function: it cannot be called for an item")
    elif arguments:
        raise RecipeError(f"arguments are for a worker class, and {name} is none: use functools.partial")


def check_importable(function: Any) -> None:
    """Raises RecipeError for a function of an interactive session, which another process cannot import."""
    main: Any = sys.modules["__main__"]
    pickling.forget_stdin()
    here = getattr(function, "__module__", None) == "__main__" and not isinstance(function, partial)
    if here and not hasattr(main, "__file__") and getattr(main, "__spec__", None) is None:
        name = getattr(function, "__qualname__", repr(function))
        raise RecipeError(f"{name} is defined in an interactive session, where workers cannot find it: {MOVE}")


def unpicklable(function: Any, error: BaseException) -> RecipeError:
    name = getattr(function, "__qualname__", repr(function))
    text = " ".join(str(error).split())
    if isinstance(error, pickle.PicklingError | AttributeError | TypeError) and ".to_dense()" not in text:
        text += f": {MOVE}"
    return RecipeError(f"{name} cannot be sent to another process: {text}")


def one_of(name: str, value: object, *allowed: str) -> None:
    if value not in allowed:
        raise RecipeError(f"{name}={value!r} of a DevicePool: use {' or '.join(map(repr, allowed))}")

"""`predict` for programs: a model and inputs over a list of devices."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainer.commands.predict.labelling import Forward
from trainer.data.tensors import as_tensor
from trainer.devices.assignment import prediction_devices
from trainer.errors import RecipeError
from trainer.pool import DevicePool
from trainer.processes import pickling
from trainer.processes.resources import cores, cuda_for


def predict(
    model: nn.Module,
    inputs: Tensor | np.ndarray[Any, Any] | Iterable[Any],
    devices: Sequence[str | torch.device] | str | torch.device = "auto",
    batch_size: int | None = None,
) -> Any:
    """A model's outputs on every device of a list, in evaluation mode, without gradients, equal to one device's.

    Args:
        model: with its weights, on the CPU or a device; every worker gets a copy of these.
        inputs: a tensor or array (N, ...), or an iterable of tensors (...), which may be endless, and one buffer that
            is filled again for each input.
        devices: as in ["cuda:0", "cuda:1", "cpu"], a worker each; "auto" is every GPU, without one the CPU.
        batch_size: inputs at once; None lets each device find what it handles best.

    Returns:
        For a tensor the outputs (N, ...) on the CPU. For an iterable an iterator of outputs, in order, a bounded number
        ahead. A model whose outputs are tuples or dictionaries gives one an input in both cases.

    Raises:
        RecipeError: no such device, a model that cannot be sent to a worker, or something else in place of either.
        ItemError: the model failed on an input; its `index` is the input's number.
    """
    if not isinstance(model, nn.Module):
        given = f"{type(model).__name__}; to label images with a run type trainer.load('runs/x').predict(images)"
        raise RecipeError(f"predict() takes a model, a torch.nn.Module, not {given}")
    iterable = isinstance(inputs, Iterable) or hasattr(inputs, "__getitem__")  # read by number, as from a data set
    if isinstance(inputs, str | bytes | os.PathLike | Mapping | DataLoader) or not iterable:
        raise RecipeError(f"predict() takes a tensor, or an iterable of single inputs, not {type(inputs).__name__}")
    if isinstance(inputs, np.ndarray):
        inputs = as_tensor(inputs)
    names = chosen_devices(devices)
    if not isinstance(inputs, Tensor):
        return _stream(model, _tensors(inputs), names, batch_size)
    outputs: Any = None
    rest: list[Any] = []
    rows = inputs if len(inputs) else inputs.new_zeros(1, *inputs.shape[1:])  # one tells the shape of none
    for row, output in enumerate(_stream(model, rows.cpu(), names, batch_size)):
        if isinstance(output, Tensor):
            if outputs is None:
                outputs = torch.empty(len(rows), *output.shape, dtype=output.dtype)
            outputs[row] = output
        else:
            rest.append(output)
    return (rest if outputs is None else outputs)[: len(inputs)]


def chosen_devices(devices: Sequence[str | torch.device] | str | torch.device) -> list[str]:
    """A worker's device each, of a list of devices, one, or "auto". Raises RecipeError."""
    single = isinstance(devices, torch.device) or (isinstance(devices, str) and devices != "auto")
    chosen: Any = [devices] if single else devices
    return prediction_devices(chosen, cuda_for(chosen), cores())


def _tensors(inputs: Iterable[Any]) -> Iterator[Any]:
    """The inputs; raises RecipeError where one is no tensor, of which a worker could make no batch."""
    for number, item in enumerate(inputs):
        if not isinstance(item, Tensor | np.ndarray):
            pair = ", and of a data set's items the input: (item[0] for item in data)" * isinstance(item, tuple | list)
            raise RecipeError(f"predict() takes tensors, not {type(item).__name__} as input {number} is{pair}")
        yield as_tensor(item)


def _stream(model: nn.Module, inputs: Iterable[Any], devices: Sequence[str], batch_size: int | None) -> Iterator[Any]:
    """A model with a lambda, or of a class that no module holds, travels by value."""
    pool, homeless = None, any(type(part).__module__ == "__main__" for part in model.modules())
    if not (homeless and pickling.nowhere_to_import()):
        with suppress(RecipeError):
            pool = DevicePool(devices, Forward, arguments=(model,), batch_size=batch_size)
    if pool is None:
        sent = pickling.packed(model, "the model", "let it hold only what can be pickled")
        pool = DevicePool(devices, Forward, arguments=(sent,), batch_size=batch_size)
    with pool:
        yield from pool.map(inputs)

"""`predict` for programs: a model and inputs over a list of devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from trainer.devices.assignment import prediction_devices
from trainer.errors import RecipeError
from trainer.inference.labelling import Forward
from trainer.pool import DevicePool
from trainer.processes import carrying
from trainer.processes.world import cores, cuda_for


def predict(
    model: nn.Module,
    inputs: Tensor | Iterable[Any],
    devices: Sequence[str] | str = "auto",
    batch_size: int | None = None,
) -> Any:
    """A model's outputs on every device of a list, in evaluation mode, without gradients, equal to one device's.

    Args:
        model: with its weights, on the CPU or a device; every worker gets a copy of these.
        inputs: a tensor (N, ...), or an iterable of tensors (...), which may be endless.
        devices: as in ["cuda:0", "cuda:1", "cpu"], a worker each; "auto" is every GPU, without one the CPU.
        batch_size: inputs at once; None lets each device find what it handles best.

    Returns:
        For a tensor the outputs (N, ...) on the CPU. For an iterable an iterator of outputs, in order, a bounded number
        ahead. A model whose outputs are tuples or dictionaries gives one an input in both cases.

    Raises:
        RecipeError: no such device, or a model that cannot be sent to a worker.
        ItemError: the model failed on an input; its `index` tells on which.
    """
    chosen = (
        devices
        if isinstance(devices, str) and devices == "auto"
        else [devices]
        if isinstance(devices, str)
        else devices
    )
    names = prediction_devices(chosen, cuda_for(chosen), cores())
    stream = _stream(model, inputs.cpu() if isinstance(inputs, Tensor) else inputs, names, batch_size)
    if not isinstance(inputs, Tensor):
        return stream
    found: Any = None
    rest: list[Any] = []
    for row, output in enumerate(stream):
        if isinstance(output, Tensor):
            if found is None:
                found = torch.empty(len(inputs), *output.shape, dtype=output.dtype)
            found[row] = output
        else:
            rest.append(output)
    return rest if found is None else found


def _stream(model: nn.Module, inputs: Iterable[Any], devices: Sequence[str], batch_size: int | None) -> Iterator[Any]:
    with _pool(model, devices, batch_size) as pool:
        yield from pool.map(inputs)


def _pool(model: nn.Module, devices: Sequence[str], batch_size: int | None) -> DevicePool:
    """Workers that have the model; one with a lambda, or of a class that no module holds, travels by value."""
    homeless = any(type(part).__module__ == "__main__" for part in model.modules())
    if not (homeless and carrying.nowhere_to_import()):
        with suppress(RecipeError):
            return DevicePool(devices, Forward, arguments=(model,), batch_size=batch_size)
    sent = carrying.packed(model, "the model", "let it hold only what can be pickled")
    return DevicePool(devices, Forward, arguments=(sent,), batch_size=batch_size)

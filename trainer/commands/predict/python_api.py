"""The function `trainer.predict`: run a model on inputs over a list of devices."""

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
from trainer.processes.resources import count_cores, count_cuda_devices
from trainer.processes.torch_context import plain_context

# Devices of workers: a list, one device, or "auto".
Devices = Sequence[str | torch.device] | str | torch.device


@plain_context()
def predict(
    model: nn.Module,
    inputs: Tensor | np.ndarray[Any, Any] | Iterable[Any],
    devices: Devices = "auto",
    batch_size: int | None = None,
) -> Any:
    """Run a model in evaluation mode, without gradients, on every device of a list.

    The outputs are in the order of the inputs, whichever device computed them.

    Args:
        model: Model with its weights, on the CPU or a device; every worker gets a copy.
        inputs: Tensor or array of shape (N, ...), or an iterable of tensors of shape (...). The
            iterable may be endless, and may yield one buffer that is refilled for each input.
        devices: Devices of the workers, as in ["cuda:0", "cuda:1", "cpu"]; "auto" is every GPU, or
            the CPU without one.
        batch_size: Number of inputs in a batch; None lets each device find its best size.

    Returns:
        For a tensor or an array, the outputs as a tensor of shape (N, ...) on the CPU. For an
        iterable, an iterator of outputs in order, which reads a bounded number of inputs ahead. If
        the model returns tuples or dictionaries, a list or an iterator with one of them for each
        input.

    Raises:
        RecipeError: There is no such device, the model cannot be sent to a worker, or an argument
            has another type.
        ItemError: The model failed on an input; its `index` is the number of the input.
    """
    if not isinstance(model, nn.Module):
        raise RecipeError(
            f"predict() accepts a model, a torch.nn.Module, not {type(model).__name__}; to label "
            "images with a run type trainer.load('runs/x').predict(images)"
        )
    # An object that is indexed by number, as a data set is, can be iterated without __iter__.
    is_iterable = isinstance(inputs, Iterable) or hasattr(inputs, "__getitem__")
    if isinstance(inputs, str | bytes | os.PathLike | Mapping | DataLoader) or not is_iterable:
        raise RecipeError(
            "predict() accepts a tensor, or an iterable of single inputs, not "
            f"{type(inputs).__name__}"
        )
    if isinstance(inputs, np.ndarray):
        inputs = as_tensor(inputs)
    names = choose_devices(devices)
    if not isinstance(inputs, Tensor):
        return _stream(model, _yield_tensors(inputs), names, batch_size)
    outputs = None
    structures = []
    rows = inputs
    # Run one sample to get the output shape for an empty input.
    if len(inputs) == 0:
        rows = inputs.new_zeros(1, *inputs.shape[1:])
    for row, output in enumerate(_stream(model, rows.cpu(), names, batch_size)):
        if isinstance(output, Tensor):
            if outputs is None:
                outputs = torch.empty(len(rows), *output.shape, dtype=output.dtype)
            outputs[row] = output
        else:
            structures.append(output)
    return (structures if outputs is None else outputs)[: len(inputs)]


def choose_devices(devices: Devices) -> list[str]:
    """Return the device of each worker for a list of devices, one device, or "auto".

    Raises:
        RecipeError: There is no such device.
    """
    is_one = isinstance(devices, torch.device) or (isinstance(devices, str) and devices != "auto")
    chosen: Any = [devices] if is_one else devices
    return prediction_devices(chosen, count_cuda_devices(chosen), count_cores())


def _yield_tensors(inputs: Iterable[Any]) -> Iterator[Any]:
    """Yield the inputs as tensors that workers can stack into batches.

    Raises:
        RecipeError: An input is neither a tensor nor an array.
    """
    for number, item in enumerate(inputs):
        if not isinstance(item, Tensor | np.ndarray):
            hint = ""
            if isinstance(item, tuple | list):
                hint = ": pass only the inputs of a data set, (item[0] for item in data)"
            raise RecipeError(
                f"predict() accepts tensors, but input {number} is a {type(item).__name__}{hint}"
            )
        yield as_tensor(item)


def _stream(
    model: nn.Module, inputs: Iterable[Any], devices: Sequence[str], batch_size: int | None
) -> Iterator[Any]:
    """Yield the outputs of a pool of workers.

    A model with a lambda, or with a class that workers cannot import, is pickled by value.
    """
    pool = None
    is_local = any(type(module).__module__ == "__main__" for module in model.modules())
    if not (is_local and pickling.has_unimportable_main()):
        with suppress(RecipeError):
            pool = DevicePool(devices, Forward, arguments=(model,), batch_size=batch_size)
    if pool is None:
        pickled = pickling.pickle_by_value(
            model, "the model", "let it hold only what can be pickled"
        )
        pool = DevicePool(devices, Forward, arguments=(pickled,), batch_size=batch_size)
    with pool:
        yield from pool.map(inputs)

"""Copy a model to torch's meta device, on which tensors have no values, or build it there."""

import copy
import gc
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer.errors import describe
from trainer.memory.measuring import Allocations

SIMPLE = (bool, int, float, str, torch.dtype)


def copy_to_meta(model: nn.Module) -> nn.Module:
    """Copy a model to the meta device. Its values are not copied."""
    memo = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if not is_lazy(tensor) and tensor.is_leaf:
            shape = tensor.detach().to("meta")
            if isinstance(tensor, nn.Parameter):
                shape = nn.Parameter(shape, tensor.requires_grad)
            memo[id(tensor)] = shape
    for tensor in list_computed_tensors(model):
        memo[id(tensor)] = tensor.detach().to("meta")
    return copy.deepcopy(model, memo).to("meta")


def list_computed_tensors(model: nn.Module) -> list[Tensor]:
    """List tensors in attributes that were computed from weights, such as by pruning.

    `copy.deepcopy` raises an error for such tensors.
    """
    tensors = []
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                tensors.append(value)
    return tensors


def build_on_meta(make: Callable[[], nn.Module]) -> tuple[nn.Module | None, str]:
    """Call `make` on the meta device.

    Returns:
        (model, "") if the model will equal one that `make` builds on the CPU, once the same weights
        are loaded into both. Otherwise (None, reason): the model's code reads values, a tensor is
        neither a parameter nor a buffer, or random numbers are drawn on another device.
    """
    random_state = torch.get_rng_state()
    try:
        with torch.device("meta"), Allocations(()) as allocations:
            model = make()
        tensors = [*model.parameters(), *model.buffers()]
        registered = {tensor.untyped_storage()._cdata for tensor in tensors}
    except Exception as error:
        # The user's code may raise any error.
        return None, f"its code needs values: {describe(error)}"

    def has_hidden_tensor() -> bool:
        return any(
            storage.device.type == "meta" and storage._cdata not in registered
            for storage in allocations.alive()
        )

    if has_hidden_tensor():
        # Tensors in reference cycles exist until the garbage collector runs.
        gc.collect()
    if has_hidden_tensor():
        return None, "it holds a tensor that is neither a parameter nor a buffer"
    if not torch.equal(random_state, torch.get_rng_state()):
        return None, "it draws random numbers on a device that it chooses itself"
    return model, ""


def iterate_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all names of parameters and buffers, with the tensors."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def compute_digest(model: nn.Module) -> str:
    """Return a digest of a model's modules, plain attributes, and tensors without their values."""
    lines: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        plain = {key: value for key, value in vars(module).items() if _is_simple(value)}
        lines.append((name, type(module).__qualname__, plain))
    first_names: dict[int, str] = {}
    for name, tensor in iterate_tensors(model):
        first_name = first_names.setdefault(id(tensor), name)
        is_parameter = isinstance(tensor, nn.Parameter)
        shape = tuple(tensor.shape)
        lines.append((name, first_name, shape, tensor.dtype, tensor.requires_grad, is_parameter))
    text = "\n".join(map(repr, lines))
    return hashlib.sha256(text.encode()).hexdigest()


def _is_simple(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_simple, value))
    return isinstance(value, SIMPLE)


def replace_tensor(tensor: Tensor, values: Tensor) -> None:
    """Replace a tensor by `values` in all objects that refer to it."""
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, tensor.requires_grad)
    torch.utils.swap_tensors(tensor, values)  # type: ignore[no-untyped-call]

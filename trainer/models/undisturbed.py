"""Restore the state of a model after passes that measure or check it."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.devices.cuda_graphs import host_random_states, set_host_random_states
from trainer.errors import RecipeError
from trainer.models.reachable import Reachable, is_own


@contextmanager
def restore_after(
    modules: Sequence[nn.Module],
    *devices: torch.device,
    weights: bool = False,
    checked: Sequence[nn.Module] | None = None,
) -> Iterator[None]:
    """Restore the state that passes of `modules` change inside this context.

    The state includes buffers, flags, random states, and all values that the modules' code reaches.

    Args:
        modules: The modules that run.
        devices: Devices whose random states are restored. Those of the CPU are always restored.
        weights: Whether to restore parameters that the user's code may write. This needs memory for
            a copy of them.
        checked: The originals, if `modules` are copies. The originals are then checked for changes
            instead of the copies.

    Raises:
        RecipeError: The passes changed state that cannot be restored, such as the position of a
            Python generator.
    """
    before = Reachable(modules)
    plain = before.plain
    if checked:
        plain = Reachable(checked).plain
    parts = set[nn.Module]()
    parameters = set[nn.Parameter]()
    tensors = set[Tensor]()
    for module in modules:
        parts.update(module.modules())
        parameters.update(module.parameters())
        tensors.update(module.buffers())
    trained = [(parameter, parameter.requires_grad) for parameter in parameters]
    if weights and any(is_own(type(part)) for part in parts):
        tensors |= parameters
    originals = [(tensor, tensor.detach().clone()) for tensor in tensors]
    objects = {id(value): value for _, value in before.values}
    try:
        with ExitStack() as stack:
            gpus = [device for device in devices if device.type == "cuda"]
            stack.enter_context(torch.random.fork_rng(gpus))
            stack.callback(set_host_random_states, *host_random_states())
            for entry in objects.values():
                stack.callback(make_restorer(entry))
            yield
    finally:
        before.restore()
        for parameter, requires_grad in trained:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad = requires_grad
        with torch.no_grad():
            for tensor, original in originals:
                if not is_expanded(tensor):
                    tensor.copy_(original)
    after = Reachable(checked or modules).plain
    for name, value in plain.items():
        # A cache may lose results, because they can be computed again.
        if not name.startswith("cache of ") and after.get(name) != value:
            raise RecipeError(
                f"each pass of the model changes its {name}, which Python cannot restore after the "
                "passes that measure and check a run: count in a number instead, or use "
                "mode=single without recompute"
            )


def find_change(
    before: Mapping[str, object],
    after: Mapping[str, object],
) -> str | None:
    """Return the first name whose value differs, or None."""
    for name in [*before, *after]:
        if before.get(name) != after.get(name):
            return name
    return None


def is_expanded(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share memory, so that torch cannot write to it."""
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in sizes)


def read_generator_states() -> dict[str, object]:
    """Return the states of the global random generators, in a form that `find_change` compares."""
    numpy_state = np.random.get_state(legacy=False)["state"]
    return {
        "random state of NumPy": (numpy_state["key"].tobytes(), numpy_state["pos"]),
        "random state of Python": random.getstate(),
        "random state of torch": torch.get_rng_state().numpy().tobytes(),
    }


def is_plain(tensor: Tensor) -> bool:
    """Return whether passes can change a tensor in place, and `restore_after` can restore it."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_inference():
        return False
    return tensor.is_leaf and not tensor.requires_grad and not is_expanded(tensor)


def is_generator(value: Any) -> bool:
    """Return whether a value is a random generator whose state can be read and set."""
    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def make_restorer(value: Any) -> Callable[[], object]:
    """Return a function that restores a generator, a tensor or an array to its current state.

    For other values, the function does nothing.
    """
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if is_generator(value):
        if isinstance(value, random.Random):
            return partial(value.setstate, value.getstate())
        return partial(value.set_state, value.get_state())
    if isinstance(value, Tensor) and is_plain(value):
        return partial(value.copy_, value.clone())
    if isinstance(value, np.ndarray) and value.flags.writeable:
        return partial(np.copyto, value, value.copy())
    return lambda: None

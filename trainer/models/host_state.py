"""Read the state on the host that an eager pass may change, but a CUDA graph replay would not."""

import functools
import hashlib
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainer.models.equivalence import read_plain_attributes
from trainer.models.reachable import Reachable
from trainer.models.undisturbed import is_generator, is_plain, read_generator_states
from trainer.saving.tensor_files import view_bytes

# Prefixes of the Python modules of libraries whose hooks only compute on the device, so that a
# graph replay repeats what they do. Hooks from all other modules count as the user's own.
LIBRARIES = ("torch.", "torchvision.", "timm.", "trainer.")


def read_host_state(
    modules: Sequence[nn.Module],
    on_device: Collection[str],
) -> dict[str, object]:
    """Return the state on the host that a pass may change, under the names that messages use.

    This is the state of random generators, and the buffers and attributes of modules.

    Args:
        modules: The modules that run.
        on_device: Types of the devices that compute. It contains "cpu" only in tests in which the
            CPU replaces a GPU.
    """
    state = read_generator_states()
    if "cpu" in on_device:
        # On a CPU that replaces a GPU, this generator belongs to the device, not to the host.
        del state["random state of torch"]
    for suffix, module in _number_modules(modules):
        reachable = Reachable([module])
        for name, attribute in read_plain_attributes(module, reachable).items():
            state[name + suffix] = attribute
        for name, value in [*_name_buffers(module), *reachable.values]:
            # A graph reads the memory of the tensors that were captured, not that of a tensor which
            # a pass assigns instead. Therefore a snapshot compares identities, too.
            if isinstance(value, Tensor | np.ndarray):
                state[name + suffix] = _Snapshot(value, on_device)
            elif is_generator(value):
                generator = getattr(value, "bit_generator", value)
                state[name + suffix] = repr(generator.__getstate__())
    return state


def list_held_tensors(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the tensors in buffers and attributes that a pass may change in place, by name."""
    tensors = {}
    for number, module in enumerate(modules):
        for name, value in [*_name_buffers(module), *Reachable([module]).values]:
            if isinstance(value, Tensor) and is_plain(value):
                tensors[f"{name} ({number})"] = value
    return tensors


def _number_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (suffix for names, module). The suffix is empty if there is only one module."""
    for number, module in enumerate(modules):
        yield f" ({number})" if len(modules) > 1 else "", module


def _name_buffers(module: nn.Module) -> list[tuple[str, Any]]:
    return [(f"buffer {name}", buffer) for name, buffer in module.named_buffers()]


class _Snapshot:
    """Identity of a tensor or array, and a digest of its numbers if they are on the host.

    The reference keeps the object alive, so that no new object can get the same id.
    """

    def __init__(
        self,
        value: Tensor | np.ndarray,
        on_device: Collection[str],
    ) -> None:
        self.value = value
        self.digest = b""
        if isinstance(value, np.ndarray):
            self.digest = hashlib.sha256(value.tobytes()).digest()
        elif is_plain(value) and value.device.type not in on_device:
            self.digest = hashlib.sha256(view_bytes(value)).digest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Snapshot):
            return False
        return self.value is other.value and self.digest == other.digest


def read_settings(modules: Sequence[nn.Module]) -> dict[str, object]:
    """Return values that a model's code may branch on, under the names that messages use.

    These are attributes, training flags, `requires_grad` of each parameter, and the name of the
    user's first hook, if any.
    """
    state = {}
    for suffix, module in _number_modules(modules):
        for name, attribute in read_plain_attributes(module, Reachable([module])).items():
            state[name + suffix] = attribute
        for name, part in module.named_modules():
            state[f"mode of {name or 'the model'}{suffix}"] = part.training
    return state | {"hooks": find_own_hook(modules)}


def find_own_hook(modules: Sequence[nn.Module]) -> str | None:
    """Return the name of the first hook that the user registered, for messages, or None.

    A replay does not run the Python code of hooks.
    """
    for module in modules:
        for name, part in module.named_modules():
            hooks = chain(
                part._forward_hooks.values(),
                part._forward_pre_hooks.values(),
                part._backward_hooks.values(),
                part._backward_pre_hooks.values(),
            )
            if not all(map(of_library, hooks)):
                return f"hook of {name or type(part).__name__}"
        for name, parameter in module.named_parameters():
            gradient_hooks = parameter._backward_hooks or {}
            accumulation_hooks = parameter._post_accumulate_grad_hooks or {}
            hooks = chain(gradient_hooks.values(), accumulation_hooks.values())
            if not all(map(of_library, hooks)):
                return f"hook of the parameter {name}"
    return None


def of_library(made: Any) -> bool:
    """Return whether a function or class, or the class of an object, is from `LIBRARIES`."""
    if isinstance(made, functools.partial):
        made = made.func
    return str(getattr(made, "__module__", None) or type(made).__module__).startswith(LIBRARIES)

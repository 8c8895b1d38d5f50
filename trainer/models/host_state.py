"""What a pass does beside its kernels, which a replay of the kernels would not do."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.models.equivalence import plain_attributes
from trainer.models.undisturbed import attributes, generators, is_generator, is_plain

# Whose hooks compute on the device and do nothing else, and whose models use the same parameters in every pass.
LIBRARIES = ("torch.", "torchvision.", "timm.", "trainer.")


def host_state(modules: Sequence[nn.Module], on_device: Collection[str]) -> dict[str, object]:
    """What a pass may change on the host, by names for messages: generators, and what modules hold.

    Args:
        on_device: types of the devices that compute; "cpu" where it stands in for one.
    """
    found = generators()
    if "cpu" in on_device:
        del found["random state of torch"]  # the device's own, from which a replay draws
    for number, module in enumerate(modules):
        mark = f" ({number})" if len(modules) > 1 else ""
        found |= {f"{name}{mark}": value for name, value in plain_attributes(module, figures=True).items()}
        for name, value in chain(((f"buffer {name}", b) for name, b in module.named_buffers()), attributes(module)):
            if isinstance(value, Tensor | np.ndarray):  # one that is assigned anew is not what a recording reads
                found[name + mark] = _Held(value, on_device)
            elif is_generator(value):
                found[name + mark] = repr(getattr(value, "bit_generator", value).__getstate__())
    return found


def held_tensors(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Buffers, and tensors among the attributes of modules: what a pass may change in place, by names for messages."""
    found: dict[str, Tensor] = {}
    for number, module in enumerate(modules):
        buffers = ((f"buffer {name}", buffer) for name, buffer in module.named_buffers())
        named = ((name, value) for name, value in chain(buffers, attributes(module)) if isinstance(value, Tensor))
        found |= {f"{name} ({number})": tensor for name, tensor in named if is_plain(tensor)}
    return found


class _Held:
    """An object, and its numbers where they lie on the host. It is kept, or another might get its id."""

    def __init__(self, value: Tensor | np.ndarray, on_device: Collection[str]) -> None:
        self.value, self.digest = value, b""
        if isinstance(value, np.ndarray):
            self.digest = hashlib.sha256(value.tobytes()).digest()
        elif is_plain(value) and value.device.type not in on_device:
            self.digest = hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy().tobytes()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.value is other.value and self.digest == other.digest

    __hash__ = None  # type: ignore[assignment]


def settings(modules: Sequence[nn.Module]) -> dict[str, object]:
    """What a model may decide by from pass to pass, by names for messages: attributes, training flags, what trains."""
    found: dict[str, object] = {}
    for number, module in enumerate(modules):
        mark = f" ({number})" if len(modules) > 1 else ""
        found |= {f"{name}{mark}": value for name, value in plain_attributes(module, figures=True).items()}
        found |= {f"mode of {name or 'the model'}{mark}": part.training for name, part in module.named_modules()}
        found |= {f"requires_grad of {name}{mark}": p.requires_grad for name, p in module.named_parameters()}
    return found | {"hooks": own_hook(modules)}


def changed_on_the_host(before: Mapping[str, object], after: Mapping[str, object]) -> str | None:
    """The name of what is not as it was; None where all is."""
    return next((name for name in [*before, *after] if before.get(name) != after.get(name)), None)


def own_hook(modules: Sequence[nn.Module]) -> str | None:
    """A hook of a user's own, by a name for messages: Python that runs while a pass is recorded, and never again."""
    for module in modules:
        for name, part in module.named_modules():
            kinds = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
            if not all(map(of_library, chain.from_iterable(kind.values() for kind in kinds))):
                return f"hook of {name or type(part).__name__}"
        for name, parameter in module.named_parameters():
            of_gradients = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
            if any(not of_library(hook) for hooks in of_gradients for hook in (hooks or {}).values()):
                return f"hook of the parameter {name}"
    return None


def of_library(made: Any) -> bool:
    """Whether a class, a function or a part of one is no user's own."""
    made = made.func if isinstance(made, functools.partial) else made
    return str(getattr(made, "__module__", None) or type(made).__module__).startswith(LIBRARIES)

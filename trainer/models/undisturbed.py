"""Passes of a model that leave no trace: measurements and proofs, before the first step and between steps."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WIDEST = 1000  # elements of a list or dictionary that is looked into: longer ones hold data
_OWN = set(vars(nn.Module()))  # what every module has


@contextmanager
def undisturbed(modules: Sequence[nn.Module], *devices: torch.device, weights: bool = False) -> Iterator[None]:
    """Restore buffers, training flags, plain attributes (counters, lists, tensors, arrays) and random states
    afterwards; where a pass of the user's may change `weights`, those too, which takes another copy's memory."""
    parts = {part for module in modules for part in module.modules()}
    flags = {part: part.training for part in parts}
    # By their names: a module that goes to another device and back has other tensors.
    buffers = [(part, name, buffer.clone()) for part in parts for name, buffer in part.named_buffers(recurse=False)]
    kept = [(p, p.detach().clone()) for p in {p for part in parts for p in part.parameters(recurse=False)} if weights]
    plain = {part: _own(part) for part in parts}
    objects = {id(value): value for module in modules for _, value in attributes(module)}
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([device for device in devices if device.type == "cuda"]))
            stack.callback(random.setstate, random.getstate())
            stack.callback(np.random.set_state, np.random.get_state())
            for value in objects.values():
                stack.callback(restorer(value))
            yield
    finally:
        for part, training in flags.items():
            part.training = training
        for part, own in plain.items():
            for name in _own(part).keys() - own.keys():
                del vars(part)[name]
            vars(part).update(own)
        with torch.no_grad():
            for part, name, before in buffers:
                if not is_expanded(buffer := part.get_buffer(name)):
                    buffer.copy_(before)
            for parameter, value in kept:
                parameter.copy_(value)


def is_expanded(tensor: Tensor) -> bool:
    """Whether several of its numbers are one in memory, to which torch does not write."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def generators() -> dict[str, object]:
    """The states of the global generators, to compare, by names for messages."""
    numpys, torchs = np.random.get_state(legacy=False)["state"], torch.get_rng_state().numpy().tobytes()
    states = {"NumPy": (numpys["key"].tobytes(), numpys["pos"]), "Python": random.getstate(), "torch": torchs}
    return {f"random state of {name}": state for name, state in states.items()}


def attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What modules have beside parameters, buffers, children, hooks and training flags, and what lists and dictionaries
    among it hold, by names for messages."""
    seen = set[int]()

    def reached(name: str, value: Any) -> Iterator[tuple[str, Any]]:
        yield name, value
        if type(value) in (list, tuple, deque, dict) and len(value) <= WIDEST and id(value) not in seen:
            seen.add(id(value))
            for number, part in enumerate(value.values() if isinstance(value, dict) else value):
                yield from reached(f"{name}[{number}]", part)

    for prefix, module in model.named_modules():
        for name, value in _own(module).items():
            yield from reached(f"attribute {prefix}{'.' * bool(prefix)}{name}", value)


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def is_plain(tensor: Tensor) -> bool:
    """Whether a pass can change the numbers of a tensor in place, and others can put them back."""
    known = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_inference()
    return known and tensor.is_leaf and not tensor.requires_grad and not is_expanded(tensor)


def is_generator(value: Any) -> bool:
    """Whether it is a random generator, whose state can be kept."""
    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def restorer(value: Any) -> Callable[[], object]:
    """What gives a changeable object its contents back: a generator, a list, a tensor that is no buffer, an array."""
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if is_generator(value):
        python = isinstance(value, random.Random)
        return partial(value.setstate, value.getstate()) if python else partial(value.set_state, value.get_state())
    if type(value) in (list, deque, dict, set):
        before, fill = copy.copy(value), value.extend if isinstance(value, list | deque) else value.update
        return lambda: (value.clear(), fill(before))
    if isinstance(value, Tensor) and is_plain(value):
        return partial(value.copy_, value.clone())
    if isinstance(value, np.ndarray) and value.flags.writeable:
        return partial(np.copyto, value, value.copy())
    return lambda: None

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

_OWN = set(vars(nn.Module()))  # what every module has


@contextmanager
def undisturbed(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Restore buffers, training flags, plain attributes (counters, lists, tensors) and random states afterwards."""
    parts = {part for module in modules for part in module.modules()}
    flags = {part: part.training for part in parts}
    # By their names: a module that goes to another device and back has other tensors.
    buffers = [(part, name, buffer.clone()) for part in parts for name, buffer in part.named_buffers(recurse=False)]
    plain = [(part, name, value) for part in parts for name, value in attributes(part).items()]
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            stack.callback(random.setstate, random.getstate())
            stack.callback(np.random.set_state, np.random.get_state())
            for restore in {id(value): _restorer(value) for _, _, value in plain}.values():
                stack.callback(restore)
            yield
    finally:
        for part, training in flags.items():
            part.training = training
        for part, name, value in plain:
            if value is None or isinstance(value, bool | int | float | str | tuple | Tensor):
                vars(part)[name] = value
        with torch.no_grad():
            for part, name, before in buffers:
                part.get_buffer(name).copy_(before)


def generators() -> dict[str, object]:
    """The states of the global generators by whose they are, to compare."""
    numpys, torchs = np.random.get_state(legacy=False)["state"], torch.get_rng_state().numpy().tobytes()
    return {"Python": random.getstate(), "NumPy": (numpys["key"].tobytes(), numpys["pos"]), "torch": torchs}


def attributes(module: nn.Module) -> dict[str, Any]:
    """What the module has beside its parameters, buffers, children, hooks and training flag."""
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def _restorer(value: Any) -> Callable[[], object]:
    """What gives a changeable object its contents back: a generator, a list, a tensor that is no buffer."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if type(value) in (list, deque, dict, set):
        before, fill = copy.copy(value), value.extend if isinstance(value, list | deque) else value.update
        return lambda: (value.clear(), fill(before))
    if isinstance(value, Tensor) and value.is_leaf and not value.requires_grad:
        return partial(value.copy_, value.clone())
    return lambda: None

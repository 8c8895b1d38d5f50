"""Random generators that hang on a user's data set, as on its transforms: what they draw belongs to a sample."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch

from trainer.models.undisturbed import WIDEST, is_generator, restorer

LEAVES = (str, bytes, int, float, type, types.ModuleType, torch.Tensor, np.ndarray)
MOST = 10_000  # objects that are looked at


class Generators:
    """Those that attributes, lists, dictionaries and functions lead to from a data set, nearest first.

    They are remembered by where they hang: some libraries make new ones in a loader worker.
    """

    def __init__(self, dataset: Any) -> None:
        self._places: list[tuple[Any, Any]] = []
        level, seen, kept = [dataset], {id(dataset)}, []
        while level and len(seen) < MOST:
            following = []
            for parts in map(_parts, level):
                kept.append(parts)  # what is made here keeps its id
                for key, part in parts.items() if isinstance(parts, dict) else enumerate(parts):
                    if is_generator(part):
                        self._places.append((parts, key))
                    elif not isinstance(part, LEAVES) and id(part) not in seen:
                        seen.add(id(part))
                        following.append(part)
            level = following

    def __iter__(self) -> Iterator[Any]:
        for holder, key in self._places:
            with suppress(LookupError):  # it was removed meanwhile
                if is_generator(generator := holder[key]):
                    yield generator

    def seed(self, key: int) -> None:
        """Begin a stream for each, which differ."""
        for number, generator in enumerate(self):
            own = (key + number * 0x9E3779B97F4A7C15) % 2**64
            if isinstance(generator, np.random.Generator):
                bits: Any = generator.bit_generator
                bits.state = type(bits)(own).state
            elif isinstance(generator, torch.Generator):
                generator.manual_seed(own >> 1)
            else:
                generator.seed(own if isinstance(generator, random.Random) else own & 0xFFFFFFFF)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put their states back afterwards."""
        with ExitStack() as stack:
            for each in self:
                stack.callback(restorer(each))
            yield


def _parts(value: Any) -> Any:
    """What an object leads to: a dictionary, list or tuple; where it holds them itself, the very one."""
    if isinstance(value, dict | list | tuple):
        return value if len(value) <= WIDEST else ()
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
    held = getattr(value, "__dict__", ())
    return held if isinstance(held, dict) else ()

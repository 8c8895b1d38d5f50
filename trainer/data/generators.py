"""Random generators that hang on a user's data set, as on its transforms: what they draw belongs to a sample."""

from __future__ import annotations

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
    """Those that attributes, lists and dictionaries lead to from a data set, nearest first.

    They are remembered by where they hang: some libraries make new ones in a loader worker.
    """

    def __init__(self, dataset: Any) -> None:
        self._places: list[tuple[Any, Any]] = []
        level, seen = [dataset], {id(dataset)}
        while level and len(seen) < MOST:
            following = []
            for value in level:
                held = value if isinstance(value, dict | list | tuple) else getattr(value, "__dict__", None)
                if not isinstance(held, dict | list | tuple) or len(held) > WIDEST:
                    continue
                for key, part in held.items() if isinstance(held, dict) else enumerate(held):
                    if is_generator(part):
                        self._places.append((held, key))
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

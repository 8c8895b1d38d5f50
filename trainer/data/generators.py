"""Random generators that belong to a user's data set, such as those of its transforms.

The generators are seeded for each sample of each epoch, so that their numbers depend neither on the
loader worker nor on the samples that this worker read before.
"""

import random
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch

from trainer.models.reachable import MAX_ENTRIES
from trainer.models.undisturbed import is_generator, make_restorer

# Types that are not searched for generators.
LEAVES = (str, bytes, int, float, type, types.ModuleType, torch.Tensor, np.ndarray)
# Number of objects after which the search goes no deeper. Deeper generators are not seeded.
MOST = 10_000


class Generators:
    """The random generators that a data set's attributes, lists and dictionaries contain.

    The search is breadth-first. A generator is remembered by its container and key, because some
    libraries replace generators in a loader worker.
    """

    def __init__(self, dataset: Any) -> None:
        self._places: list[tuple[Any, Any]] = []
        level = [dataset]
        seen = {id(dataset)}
        while level and len(seen) < MOST:
            following = []
            for value in level:
                container = value
                if not isinstance(value, dict | list | tuple):
                    container = getattr(value, "__dict__", None)
                if not isinstance(container, dict | list | tuple) or len(container) > MAX_ENTRIES:
                    continue
                for key, part in (
                    container.items() if isinstance(container, dict) else enumerate(container)
                ):
                    if is_generator(part):
                        self._places.append((container, key))
                    elif not isinstance(part, LEAVES) and id(part) not in seen:
                        seen.add(id(part))
                        following.append(part)
            level = following

    def __iter__(self) -> Iterator[Any]:
        for container, key in self._places:
            # The data set may have removed a generator since the search.
            with suppress(LookupError):
                if is_generator(generator := container[key]):
                    yield generator

    def seed(self, key: int) -> None:
        """Seed each generator with a different number that depends on `key`."""
        for number, generator in enumerate(self):
            own_key = (key + number * 0x9E3779B97F4A7C15) % 2**64
            if isinstance(generator, np.random.Generator):
                bits = generator.bit_generator
                bits.state = type(bits)(own_key).state
            elif isinstance(generator, torch.Generator):
                generator.manual_seed(own_key >> 1)
            elif isinstance(generator, random.Random):
                generator.seed(own_key)
            else:
                # NumPy's RandomState accepts 32 bits.
                generator.seed(own_key & 0xFFFFFFFF)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager that restores the states of the generators at its end."""
        with ExitStack() as stack:
            for generator in self:
                stack.callback(make_restorer(generator))
            yield

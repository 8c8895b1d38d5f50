"""The tape with compiled code: `plugin=tests.simulated.compiled_tape_plugin`.

The kernels of the compiler are torch's own operators here, which a tape can record. This tape does
not see Python functions that read a tensor without an operator, such as `tolist`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager

from tests.simulated import tape

MESSAGE = "compiled code is recorded"
printed: list[str] = []


class NoReads(tape.Reads):
    """A function mode would make torch compile everything again for a recording."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def compile_to_operators(graph: fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Any]:
    compiled = aot_eager(graph, examples)

    def call(*arguments: Any) -> Any:
        if tape.is_recording() and not printed:
            printed.append(MESSAGE)
            print(MESSAGE, flush=True)
        return compiled(*arguments)

    return call


torch.compile = partial(torch.compile, backend=compile_to_operators)
tape.Reads = NoReads  # type: ignore[misc]
# Torch runs no compiled code in a mode that is not its own.
tape.Watch.is_infra_mode = classmethod(lambda cls: True)  # type: ignore[method-assign, assignment]

from tests.simulated import tape_plugin  # noqa: E402, F401

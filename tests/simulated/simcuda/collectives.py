"""Collectives of simulated devices: as with NCCL, they run on a stream of their own, for which
`wait` makes the current stream wait, not the host.

What C++ calls by itself, such as DDP's reducer, stays on the current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.simulated.simcuda.order import Stream


class Work:
    """A collective that runs. It keeps its tensor until somebody waits for it, as torch does."""

    def __init__(self, machine: Any, work: Any, stream: Stream, tensor: Tensor) -> None:
        self.machine, self.work, self.stream = machine, work, stream
        self.tensor: Tensor | None = tensor

    def wait(self) -> None:
        self.work.wait()
        self.machine.current_stream(self.stream.device_index).wait_stream(self.stream)
        self.tensor = None


def on_its_stream(function: Callable[..., Any], machine: Any) -> Callable[..., Any]:
    """Run a function of `torch.distributed` on the stream of the communicator of its device."""
    streams: dict[int, Stream] = {}

    def called(tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        index = machine.memory.device(tensor)
        if index is None:
            return function(tensor, *args, async_op=async_op, **kwargs)
        if index not in streams:
            streams[index] = Stream(machine, index)
        stream = streams[index]
        stream.wait_stream(machine.current_stream(index))
        with stream:
            started = function(tensor, *args, async_op=True, **kwargs)
        work = Work(machine, started, stream, tensor)
        if async_op:
            return work
        return work.wait()

    return called

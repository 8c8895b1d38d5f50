"""Asynchronous copies from host memory to a device, which overlap with the device's computation."""

from collections.abc import Callable

import torch
from torch import Tensor

# Function that makes the current stream wait for the copy, and returns the copied tensor.
Copy = Callable[[], Tensor]


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a GPU asynchronously; if `device` is the CPU, return `values` itself."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


class Copies:
    """Copies to a GPU on a separate stream, so that they do not wait for the GPU's kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, values: Tensor, change: Callable[[Tensor], None] | None = None) -> Copy:
        """Start to copy `values` to the GPU, and return a function that delivers the copy.

        The caller may change `values` as soon as this method returns.

        Args:
            values: a CPU tensor.
            change: function that changes the copy in place, on the stream of the copies.
        """
        with torch.cuda.stream(self._stream):
            copied = copy_to_device(values, self._device)
            if change:
                change(copied)
        event = self._stream.record_event()

        def arrive() -> Tensor:
            current = torch.cuda.current_stream(copied.device)
            current.wait_event(event)
            # The memory was allocated on the copy stream. Without this call, the allocator might
            # reuse it while the current stream still reads it.
            copied.record_stream(current)
            return copied

        return arrive

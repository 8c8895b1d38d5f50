"""From the host's memory to a device, while that computes."""

from __future__ import annotations

import torch
from torch import Tensor


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy, for which the host does not wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class Copies:
    """Copies on a stream of their own: they do not queue behind the computing that the device has been given."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, values: Tensor) -> Tensor:
        """A copy that the current stream may use from here on."""
        if self._stream is None:
            return on_device(values, self._device)
        with torch.cuda.stream(self._stream):
            copied = on_device(values, self._device)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        copied.record_stream(current)  # its memory is the other stream's
        return copied

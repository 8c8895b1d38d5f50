"""Copies from host memory to a device, overlapped with its computing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """An asynchronous copy."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class Copy:
    """An asynchronous copy to a device, on a stream of its own."""

    def __init__(self, values: Tensor, event: Any) -> None:
        self._values, self._event = values, event

    def arrived(self) -> Tensor:
        """The tensor, for use on the current stream, which waits for this copy."""
        if self._event is not None:
            current = torch.cuda.current_stream(self._values.device)
            current.wait_event(self._event)
            self._values.record_stream(current)  # it was allocated on the other stream
        return self._values


class Copies:
    """Copies on a stream of their own, which do not queue behind the device's kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, values: Tensor) -> Copy:
        """Start a copy; `values` may change as soon as this returns."""
        if self._stream is None:
            return Copy(on_device(values, self._device), None)
        with torch.cuda.stream(self._stream):
            copied = on_device(values, self._device)
        event = self._stream.record_event()
        return Copy(copied, event)

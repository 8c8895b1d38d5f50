"""From the host's memory to a device, while that computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PART = 2**24  # bytes of pinned memory through which a large set travels at a time


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy, for which the host does not wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def set_on_device(values: Tensor, device: torch.device) -> Tensor:
    """The same of a whole set, part by part: pinned memory is not given back to the system."""
    if device.type != "cuda":
        return values.to(device)
    copied = torch.empty_like(values, device=device)
    rows = max(1, PART * len(values) // max(1, values.nbytes))
    for there, here in zip(torch.split(copied, rows), torch.split(values, rows), strict=True):
        there.copy_(here.pin_memory(), non_blocking=True)
    return copied


class Copy:
    """A tensor on its way to a device, on a stream of its own."""

    def __init__(self, values: Tensor, event: Any) -> None:
        self._values, self._event = values, event

    def arrived(self) -> Tensor:
        """It, for the current stream to use from here on; only that waits, and only for this copy."""
        if self._event is not None:
            current = torch.cuda.current_stream(self._values.device)
            current.wait_event(self._event)
            self._values.record_stream(current)  # its memory is the other stream's
        return self._values


class Copies:
    """Copies on a stream of their own: they do not queue behind the computing that the device has been given."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, values: Tensor) -> Copy:
        """Send it; `values` may change as soon as this returns."""
        if self._stream is None:
            return Copy(on_device(values, self._device), None)
        with torch.cuda.stream(self._stream):
            copied = on_device(values, self._device)
        event = self._stream.record_event()
        return Copy(copied, event)

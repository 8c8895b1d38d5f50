"""A stage as the ranks beside it see it: what travels between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class _Received(torch.autograd.Function):
    """The identity; its gradient, which goes back to the rank before, is contiguous. That of `cat` would not be."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class Wire(nn.Module):
    """A stage as neighbours see it: what goes between ranks is contiguous, channels_last images as (N, H, W, C)."""

    def __init__(self, stage: nn.Module, run: Callable[[nn.Module, Tensor], Tensor], first: bool, last: bool) -> None:
        super().__init__()
        self.stage, self._run, self._first, self._last = stage, run, first, last

    def forward(self, received: Tensor) -> Tensor:
        if not self._first:
            received = _Received.apply(received)
            if received.dim() == 4:
                received = received.permute(0, 3, 1, 2)
        out = self._run(self.stage, received)
        if not self._last and out.dim() == 4:
            out = out.permute(0, 2, 3, 1)
        out = out.contiguous()
        # Schedules with a backward pass in two parts detach what was sent in place, which a view does not allow.
        return out.clone() if out._is_view() else out

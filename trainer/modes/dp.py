"""`dp`: `nn.DataParallel`, for comparison: one process copies the model to every device for each pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.recompute import Run, recompute
from trainer.modes.base import Strategy


def rows_of_devices(rows: int, devices: int) -> list[int]:
    """How many of a batch's rows each device gets: torch's rule for chunks, so that few rows use few devices."""
    return [len(chunk) for chunk in torch.arange(rows).chunk(devices)]


class Replica(nn.Module):
    """A model that opens autocast by itself: its data type is a thread's own, and torch runs replicas in threads that
    it enters without one, which on CUDA means fp16."""

    def __init__(
        self, model: nn.Module, run: Callable[[nn.Module, Tensor], Tensor], recomputed: Sequence[Run] = ()
    ) -> None:
        super().__init__()
        self.model, self.run, self.recomputed = model, run, recomputed

    def forward(self, inputs: Tensor) -> Tensor:
        if getattr(self.model, "_is_replica", False):  # which runs its own blocks anew, not those that it copies
            recompute(self.model, self.recomputed)
        return self.run(self.model, inputs)


class DataParallel(Strategy):
    """`nn.DataParallel` over the process's devices. Without CUDA torch passes everything through to the module."""

    def connect(self) -> None:
        super().connect()
        self.rows = self.context.example.rows
        self.passes_through = self.device.type != "cuda"
        self.wrapped: nn.Module = Replica(self.module, self.in_precision, self.recomputed)
        if not self.passes_through:  # on the CPU torch would take GPUs that the recipe does not name
            self.wrapped = nn.DataParallel(self.wrapped, [d.index for d in self.world.drives])
        self.shapes = self._probe()

    def outputs(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.wrapped(inputs)
        return out

    def _probe(self) -> str:
        """The shapes outside and inside of one pass, as (N, C, H, W) in and (N, classes) out."""
        shape = self.context.example.shape
        inside: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

        def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            inside.append((tuple(inputs[0].shape), tuple(output.shape)))

        hook = self.module.register_forward_hook(note)
        self.train(False)
        outputs = self.forward(self.context.example.zeros(self.device, channels_last=self.recipe.channels_last).inputs)
        hook.remove()
        assert outputs is not None
        ins, outs = (", ".join(str(pair[side]) for pair in sorted(inside, reverse=True)) for side in (0, 1))
        return f"in {shape} outside, {ins} inside; out {outs} inside, {tuple(outputs.shape)} outside"

    def notes(self) -> dict[str, str]:
        how = f"nn.DataParallel over {len(self.world.drives)} devices is for comparison; mode=ddp is faster"
        if self.recipe.channels_last and len(self.world.drives) > 1:
            how += ". It copies weights without their channels_last order, so each pass of a copy reorders them"
        if self.passes_through:
            cards = max(2, len(self.world.drives))
            rows = "+".join(map(str, rows_of_devices(self.rows, cards)))
            how = f"nn.DataParallel without CUDA passes through to one device ({cards} GPUs would get {rows} images): "
            how += "no speed to compare; mode=ddp is faster"
        return {"note": how, "shapes": self.shapes}

    def result_fields(self) -> dict[str, Any]:
        devices = 1 if self.passes_through else len(self.world.drives)
        return {"data_parallel": {"devices": devices, "pass_through": self.passes_through}}

"""Ranks of `fsdp` send each other parts of weights and gradients, and which they are is told by the order alone: where
ranks go different ways through the model, one would compute with another block's weights, or wait for ever."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

FIRST_PASSES = 4  # on cards, in which ranks compare each exchange before it


class Order:
    """Compares what ranks exchange next: on the CPU before each exchange, on cards only in a run's first passes, for
    they would wait for each other. What they did later is in `digest`, to be compared once in a while.

    Raises `refusal` of the reason on every rank where they differ.
    """

    def __init__(self, refusal: Callable[[str], Exception], always: bool) -> None:
        self.digest = 0
        self._refusal = refusal
        self._left: float = float("inf") if always else FIRST_PASSES

    def watch(self, unit: Any, name: str) -> None:
        """Compare each exchange of a unit that was sharded just now."""
        unit.set_custom_all_gather(_Gather(lambda size: self._compare([name], f"gather {size}")))
        unit.set_custom_reduce_scatter(_Reduce(lambda size: self._compare([name], f"reduce {size}")))

    def end_pass(self, used: Sequence[str] = ()) -> None:
        """A pass is over, which gave these parameters a gradient."""
        self._compare(used, "end")
        self._left -= 1

    def _compare(self, names: Sequence[str], what: str) -> None:
        code = zlib.crc32(repr((names, what)).encode())
        self.digest = (self.digest * 31 + code) % 2**16
        if self._left <= 0:
            return
        extremes = torch.tensor([code, -code])
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        if extremes.sum() == 0:
            return
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, [*names])
        raise self._refusal(self.reason(every))

    @staticmethod
    def reason(every: Sequence[Sequence[str]] = ()) -> str:
        """Names are what each rank was about to send, or has used."""
        sets: list[set[str]] = [{*names} for names in every] or [set()]
        names = sorted(set.union(*sets) - set.intersection(*sets) or set.union(*sets))
        which = ", ".join(name or "its outer layers" for name in names[:4]) or "some blocks"
        return f"uses {which} on some ranks and not on others, or in another order"


class _Gather(DefaultAllGather):
    """torch's own, after a look at what the others do."""

    def __init__(self, look: Callable[[int], None]) -> None:
        self._look = look

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        self._look(input_tensor.numel())
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


class _Reduce(DefaultReduceScatter):
    """The same for gradients."""

    def __init__(self, look: Callable[[int], None]) -> None:
        self._look = look

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        self._look(input_tensor.numel())
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)

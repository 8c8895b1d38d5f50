"""What `fsdp` gathers at a time: units of a model, and what a unit must be like."""

from __future__ import annotations

import gc
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from trainer.models.blocks import blocks
from trainer.models.given import has_hooks
from trainer.models.memory import COPIES
from trainer.models.recompute import anew, compiled

Storage = weakref.ref[torch.UntypedStorage]
TRIES = 20
FIRST = 4  # passes
TINY = 0.005  # of the model's parameters: blocks below this are gathered with the root, all at once


def units_of(model: nn.Module) -> list[str]:
    """Names of the blocks that are gathered each by itself; what else there is belongs to the root.

    A block with parameters that another part has as well (tied weights) is the root's, and so is one that is not
    called by itself, and a tiny one.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    holders: dict[nn.Parameter, set[str]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(path)
    units = []
    for block in blocks(model):
        module = model.get_submodule(block.name)
        parameters = list(module.parameters())
        inside = {f"{block.name}.{path}".rstrip(".") for path, _ in module.named_modules()}
        tied = any(holders[parameter] - inside for parameter in parameters)
        called = type(module).forward is not nn.Module.forward
        if block.name and called and not tied and sum(p.numel() for p in parameters) >= TINY * total:
            units.append(block.name)
    return units


def unit_sizes(model: nn.Module, units: Sequence[str]) -> list[int]:
    """Bytes of the parameters of the root, and of each unit."""
    inside = [sum(p.numel() * p.element_size() for p in model.get_submodule(name).parameters()) for name in units]
    return [sum(p.numel() * p.element_size() for p in model.parameters()) - sum(inside), *inside]


def teacher_share(teacher: int, student: int, parts: int) -> int:
    """Bytes that a rank holds of a teacher: its shards where all would be more than it keeps of the student, with
    gradients and optimizer."""
    return -(-teacher // parts) if teacher * parts > COPIES * student else teacher


def whole_parameters(unit: nn.Module, prefix: str = "") -> dict[str, nn.Parameter]:
    """Parameters that are whole at present, by name."""
    return {name: p for name, p in unit.named_parameters(prefix=prefix) if not isinstance(p, DTensor)}


def unshardable(unit: nn.Module, prefix: str) -> str | None:
    """What of a unit that is whole `fully_shard` cannot divide."""
    parameters = whole_parameters(unit, prefix)
    for name, parameter in parameters.items():
        if not parameter.dim():
            return f"has a parameter without dimensions, {name}"
        if not parameter.numel():
            return f"has an empty parameter, {name}"
        if has_hooks(parameter):
            return f"has a hook of a parameter, {name}"
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in parameters.values() if p.requires_grad})
    return f"trains {' and '.join(kinds)} in one block" if len(kinds) > 1 else None


def storages(unit: nn.Module, prefix: str) -> list[tuple[str, Storage]]:
    """Of the parameters that are whole, with their names."""
    return [(name, weakref.ref(p.untyped_storage())) for name, p in whole_parameters(unit, prefix).items()]


def kept_whole(before: Sequence[tuple[str, Storage]]) -> str | None:
    """What of the parameters that are sharded by now the model has in another place too, where it would not train."""
    for _ in range(TRIES):
        kept = next((name for name, storage in before if storage() is not None), None)
        if kept is None:
            return None
        gc.collect()  # what only refers to itself
        time.sleep(0.1)  # gloo's thread lets go of what it has sent a little later
    return f"keeps {kept} in a second place, as in a list or a view"


def compile_forward(unit: nn.Module, name: str) -> None:
    """Compile a unit without the hooks around it, at which torch's tracer would stop, and inside of what computes it
    anew."""
    inside = getattr(unit.forward, "anew", None)
    unit.forward = anew(compiled(inside, name), [unit]) if inside else compiled(unit.forward, name)


def copy_views(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """What changes a view in place drops torch's hook on it, and the backward pass would use weights that are freed."""
    return tree_map_only(Tensor, lambda output: output.clone() if output._is_view() else output, outputs)


class Order:
    """Ranks tell what they send each other by the order alone: one that goes another way through the model would get
    weights and gradients of another block, or wait for ever.

    In the `FIRST` passes they compare what is next before each exchange. Later they compare what there was, after every
    so many passes, and before what is evaluated or saved. Where they differ, each raises `refusal`.
    """

    def __init__(self, refusal: Callable[[str], Exception], every: int) -> None:
        self._refusal, self._every, self._passes, self._digest = refusal, every, 0, 0

    def watch(self, unit: Any, name: str) -> None:
        """Look before each exchange of a unit that was sharded just now."""
        unit.set_custom_all_gather(_looking(DefaultAllGather, name, self._next))
        unit.set_custom_reduce_scatter(_looking(DefaultReduceScatter, name, self._next))

    def end_pass(self, used: Sequence[str] = ()) -> None:
        """After a pass in training, in which these parameters got a gradient."""
        self._passes += 1
        self._next(used, "end", self._passes % self._every == 0)

    def _next(self, names: Sequence[str], what: str, due: bool = False) -> None:
        self._digest = zlib.crc32(repr((self._digest, *names, what)).encode())
        if due or self._passes < FIRST:
            self.compare(names)

    def compare(self, names: Sequence[str] = ()) -> None:
        """Raise on every rank where one did something else, lately with these units or parameters."""
        extremes = torch.tensor([self._digest, -self._digest])
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        if extremes.sum():
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, {*names})
            common = every[0].intersection(*every)
            unlike = sorted(set.union(*every) - common) or (common if len(common) == 1 else ["its blocks"])
            which = ", ".join(name or "its outer layers" for name in [*unlike][:4])
            raise self._refusal(f"uses {which} on some ranks and not on others, or in another order")


def _looking(kind: Any, name: str, look: Callable[[Sequence[str], str], None]) -> Any:
    """A collective of torch's for one unit, after a look at how much it sends."""

    class Looking(kind):  # type: ignore[misc]
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            look([name], f"{kind.__name__} {input_tensor.numel()}")
            return super().__call__(output_tensor, input_tensor, *args, **kwargs)

    return Looking()

"""Units of a model for `fsdp`: modules whose parameters are gathered together, and their checks."""

import gc
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from trainer.devices import cuda_graphs
from trainer.models.blocks import list_blocks
from trainer.models.given import has_hooks
from trainer.models.recompute import checkpoint_forward, compile_call

Storage = weakref.ref[torch.UntypedStorage]
# Maximum number of garbage collections before a storage that is still alive is an error.
COLLECTIONS = 20
# Number of passes at the start in which ranks compare every exchange.
FIRST_PASSES = 4
# Minimum fraction of the model's parameters in a unit. Smaller blocks are gathered with the root.
TINY = 0.005


def find_units(model: nn.Module) -> list[str]:
    """List the names of the blocks that are units. All other parameters belong to the root's unit.

    The root's unit contains blocks that share parameters with other modules (tied weights), blocks
    without a `forward` of their own (such as nn.ModuleList), blocks made by torch.jit.script, and
    blocks with less than `TINY` of the parameters.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    holders: dict[nn.Parameter, set[str]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(path)
    units = []
    for block in list_blocks(model):
        module = model.get_submodule(block.name)
        parameters = list(module.parameters())
        inside = {f"{block.name}.{path}".rstrip(".") for path, _ in module.named_modules()}
        is_tied = any(holders[parameter] - inside for parameter in parameters)
        is_scripted = isinstance(module, torch.jit.ScriptModule)
        is_called = not is_scripted and type(module).forward is not nn.Module.forward
        is_large = sum(map(Tensor.numel, parameters)) >= TINY * total
        if block.name and is_called and not is_tied and is_large:
            units.append(block.name)
    return units


def list_whole_parameters(unit: nn.Module, prefix: str = "") -> dict[str, nn.Parameter]:
    """Return the parameters of a unit that are not sharded yet, by name."""
    named = unit.named_parameters(prefix=prefix)
    return {name: whole for name, whole in named if not isinstance(whole, DTensor)}


def find_sharding_obstacle(unit: nn.Module, prefix: str) -> str | None:
    """Return the reason why `fully_shard` cannot shard a unit, or None if it can."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in unit.modules()):
        return "has a module made by torch.jit.script"
    types = set()
    for name, parameter in list_whole_parameters(unit, prefix).items():
        if not parameter.dim():
            return f"has a parameter without dimensions, {name}"
        if not parameter.numel():
            return f"has an empty parameter, {name}"
        if has_hooks(parameter):
            return f"has a hook of a parameter, {name}"
        if parameter.requires_grad:
            types.add(str(parameter.dtype).removeprefix("torch."))
    if len(types) > 1:
        return f"trains {' and '.join(sorted(types))} in one block"
    return None


def list_storages(unit: nn.Module, prefix: str) -> list[tuple[str, Storage]]:
    """Return weak references to the storages of a unit's parameters that are not sharded yet."""
    named = list_whole_parameters(unit, prefix).items()
    return [(name, weakref.ref(parameter.untyped_storage())) for name, parameter in named]


def find_kept_parameter(before: Sequence[tuple[str, Storage]]) -> str | None:
    """Find a sharded parameter whose whole tensor is still in memory.

    The model would compute with this tensor, which is not trained.

    Args:
        before: the result of `list_storages`, from before the parameters were sharded.

    Returns:
        The reason to refuse the model, or None if there is no such parameter.
    """
    for _ in range(COLLECTIONS):
        alive = next((name for name, storage in before if storage() is not None), None)
        if alive is None:
            return None
        # Reference cycles may keep a storage alive until they are collected.
        gc.collect()
        # After a tensor was sent, gloo's thread releases it with a short delay.
        time.sleep(0.1)
    return f"keeps {alive} in a second place, as in a list or a view"


def compile_forward(unit: nn.Module, name: str) -> None:
    """Compile the forward pass of a unit, without the unit's hooks.

    Torch's compiler would break the graph at the hooks. If the unit recomputes its activations, the
    function that is called twice, in the forward and in the backward pass, is compiled.
    """
    inside = getattr(unit.forward, "anew", None)
    if inside:
        unit.forward = checkpoint_forward(compile_call(inside, name), [unit])
    else:
        unit.forward = compile_call(unit.forward, name)


def copy_views(
    module: nn.Module,
    inputs: Any,
    outputs: Any,
) -> Any:
    """Replace outputs that are views by copies. The function is a forward hook.

    An operation that changes a view in place removes torch's hook from the view. The backward pass
    would then use weights that are already freed.
    """

    def copy_view(output: Tensor) -> Tensor:
        return output.clone() if output._is_view() else output

    return tree_map_only(Tensor, copy_view, outputs)


class Order:
    """Check that all ranks gather and reduce the same units in the same order.

    Ranks match messages by their order alone. A rank that takes another path through the model
    would receive the weights and gradients of a different block, or hang.

    In the first `FIRST_PASSES` passes ranks compare each exchange before it starts. Later they
    compare a digest of all exchanges at the end of each pass whose number is a multiple of `every`,
    and whenever `compare` is called. If the digests differ, every rank raises the error that
    `refuse` returns.

    Passes that are captured in a CUDA graph are not recorded: a capture exchanges nothing, and may
    fail on one rank alone.
    """

    def __init__(
        self,
        refuse: Callable[[str], Exception],
        every: int,
    ) -> None:
        self._refuse = refuse
        self._every = every
        self._passes = 0
        self._digest = 0

    def watch(
        self,
        unit: Any,
        name: str,
    ) -> None:
        """Record each exchange of a sharded unit before it starts."""
        unit.set_custom_all_gather(_note_before(DefaultAllGather, name, self._note))
        unit.set_custom_reduce_scatter(_note_before(DefaultReduceScatter, name, self._note))

    def end_pass(self, used: Sequence[str] = ()) -> None:
        """Record the end of a pass, and the names of the parameters that got a gradient in it."""
        self._passes += 1
        self._note(used, "end", self._passes % self._every == 0)

    def _note(
        self,
        names: Sequence[str],
        event: str,
        is_due: bool = False,
    ) -> None:
        if cuda_graphs.is_capturing:
            return
        history = self._digest, *names, event
        self._digest = zlib.crc32(repr(history).encode())
        if is_due or self._passes < FIRST_PASSES:
            self.compare(names)

    def compare(self, names: Sequence[str] = ()) -> None:
        """Compare the exchanges of all ranks, and raise on every rank if they differ. Collective.

        Args:
            names: names of the latest unit, or of the parameters that got a gradient in the latest
                pass, for the error.
        """
        # The maximum of the negative digests is minus the smallest digest, so the sum is 0 only if
        # all digests are equal.
        extremes = torch.tensor([self._digest, -self._digest])
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        if extremes.sum():
            names_of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(names_of_ranks, {*names})
            common = names_of_ranks[0].intersection(*names_of_ranks)
            suspects = sorted(set.union(*names_of_ranks) - common)
            if not suspects:
                suspects = [*common] if len(common) == 1 else ["its blocks"]
            subject = ", ".join(name or "its outer layers" for name in suspects[:4])
            raise self._refuse(
                f"uses {subject} on some ranks and not on others, or in another order"
            )


def _note_before(
    kind: Any,
    name: str,
    note: Callable[[Sequence[str], str], None],
) -> Any:
    """Return a collective of torch's class `kind` for the unit `name`, which calls `note` first."""

    class Noting(kind):  # type: ignore[misc]
        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            note([name], f"{kind.__name__} {input_tensor.numel()}")
            return super().__call__(output_tensor, input_tensor, *args, **kwargs)

    return Noting()

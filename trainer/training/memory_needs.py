"""How much memory a run needs on its device, and which key to change if that is too much."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainer.errors import DeviceMemoryError, TrainerError, is_out_of_memory, text_of
from trainer.models.memory import size_of
from trainer.models.recompute import runs_of
from trainer.recipe.checks import divides
from trainer.telemetry.device_memory import total_memory
from trainer.telemetry.readable import as_size
from trainer.training.parts import PARTS
from trainer.training.state import Resolved, TrainState


@contextmanager
def shortage_explained(resolved: Resolved, state: TrainState) -> Iterator[None]:
    """Raises DeviceMemoryError, with what to change, where memory runs out within this block."""
    try:
        yield
    except Exception as error:
        if isinstance(error, TrainerError) or not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"{_needs(resolved, state)} ({text_of(error)[:200] or type(error).__name__})"
        ) from error


def _needs(resolved: Resolved, state: TrainState) -> str:
    """What this run keeps on its device, and the keys that lower what a step takes beyond."""
    recipe, world, staged = resolved.recipe, resolved.world, resolved.recipe.traits.staged
    tensors = [tensor for kind in PARTS if kind.trains for tensor in kind(resolved, state).tensors().values()]
    tensors += [parameter for parameter in state.parameters.values() if parameter.requires_grad]  # their gradients
    # What fsdp.offload keeps on the host is not on the device that is full.
    resident = size_of(*(tensor for tensor in tensors if tensor.device.type == world.device.type))
    count = state.strategy.share.count
    pieces = range(recipe.accumulate + 1, recipe.batch_size // count + 1)
    more = next((n for n in pieces if divides(recipe, count, n)), None)
    words = [f"accumulate={more} or more, which computes the same batch in smaller pieces"] * (more is not None)
    words += ["recompute=true, which is slower"] * (
        recipe.recompute is not True and (staged or bool(not recipe.compile and runs_of(state.strategy.module)))
    )
    if recipe.traits.exchanges == "shards" and state.strategy.home.type == "cuda" and recipe.precision != "fp16":
        words += ["fsdp.offload=true, which is slower"] * (world.size > 1)
    words += ["a smaller batch_size"]
    if not staged and recipe.traits.exchanges != "shards":
        words += ["for a model too big for one device, mode=fsdp or mode=pipeline with nproc=2"]
    has = f"which has {as_size(total_memory(world.device))}: weights, gradients and optimizer take {as_size(resident)}"
    return f"out of memory on {world.name}, {has}; type {', or '.join(words)}"

"""How much memory a run needs on its device, and which key to change if that is too much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import nn

from trainer.devices.precision import AUTOCAST
from trainer.errors import DeviceMemoryError, TrainerError, is_out_of_memory, text_of
from trainer.models.memory import pass_of, room_in, size_of
from trainer.recipe import Recipe
from trainer.recipe.checks import divides, most_rows
from trainer.telemetry.device_memory import total_memory
from trainer.telemetry.readable import as_size
from trainer.training.initial_model import model_of
from trainer.training.parts import PARTS
from trainer.training.state import Resolved, TrainState


def bytes_of_sample(model: nn.Module, recipe: Recipe, shape: Sequence[int]) -> float:
    """What each sample of this shape adds to a pass; 0 where shapes alone do not tell."""
    try:
        two, four = (pass_of(model, (rows, *shape)).peak for rows in (2, 4))
    except (NotImplementedError, RuntimeError):
        return 0.0
    return (four - two) / 2 * (0.5 if recipe.precision in AUTOCAST else 1.0)


def pieces_that_fit(recipe: Recipe, count: int, least: int, per_sample: float, room: float) -> int | None:
    """The fewest pieces of each of `count` shards, at least so many, whose passes fit into `room` bytes.

    Where nothing fits, the most pieces there can be, for the operating system has the last word; None where there are
    not so many.
    """
    counts = [n for n in range(least, recipe.batch_size // count + 1) if divides(recipe, count, n)]
    fitting = (n for n in counts if most_rows(recipe, count, n) * per_sample <= room)
    return next(fitting, counts[-1] if counts else None)


@contextmanager
def shortage_explained(resolved: Resolved, state: TrainState) -> Iterator[None]:
    """Raises DeviceMemoryError, with what to change, where memory runs out within this block."""
    try:
        yield
    except Exception as error:
        if isinstance(error, TrainerError) or not is_out_of_memory(error):
            raise
        raise _out_of_memory(resolved, state, error) from error


def _out_of_memory(resolved: Resolved, state: TrainState, error: BaseException) -> DeviceMemoryError:
    """What a step of this run takes of its device's memory, and the keys that lower it."""
    recipe, world, staged = resolved.recipe, resolved.world, resolved.recipe.traits.staged
    tensors = [tensor for kind in PARTS if kind.trains for tensor in kind(resolved, state).tensors().values()]
    tensors += [parameter for parameter in state.parameters.values() if parameter.requires_grad]  # their gradients
    # What fsdp.offload keeps on the host is not on the device that is full.
    resident = size_of(*(tensor for tensor in tensors if tensor.device.type == world.device.type))
    count = state.strategy.share.count
    at_once = most_rows(recipe, count)
    per_sample = 0.0
    with suppress(Exception), torch.device("meta"):  # a model of the user's may raise anything while it is made
        model = model_of(recipe, resolved.task, resolved.datasets, starting=False)
        per_sample = bytes_of_sample(model, recipe, resolved.datasets.example(1).inputs.shape)
    total = total_memory(world.device)
    needs = f"weights, gradients and optimizer take {as_size(resident)}"
    if per_sample and not staged:
        needs += f", a pass over a batch of {at_once} about {as_size(per_sample * at_once)}"
    room = room_in(total, world.sharing(), resident)
    pieces = pieces_that_fit(recipe, count, recipe.accumulate + 1, per_sample, room)
    words = [f"accumulate={pieces}, which computes the same batch in smaller pieces"] * (pieces is not None)
    words += ["pipeline.recompute=true"] * (recipe.traits.micro_batches and not recipe.pipeline.recompute)
    if recipe.traits.exchanges == "shards" and state.strategy.home.type == "cuda" and recipe.precision != "fp16":
        words += ["fsdp.offload=true, which is slower"] * (world.size > 1)
    words += ["a smaller batch_size"]
    if not staged and recipe.traits.exchanges != "shards":
        words += ["for a model too big for one device, mode=fsdp or mode=pipeline with nproc=2"]
    return DeviceMemoryError(
        f"out of memory on {world.name}, which has {as_size(total)}: {needs}; type {', or '.join(words)} "
        f"({text_of(error)[:200] or type(error).__name__})"
    )

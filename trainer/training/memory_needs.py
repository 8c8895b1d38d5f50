"""How much memory a run needs on its device, which key to change if that is too much, and how one that chooses its
pieces goes on then."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from trainer.data import steps_per_epoch
from trainer.errors import DeviceMemoryError, RecipeError, TrainerError, is_out_of_memory, text_of
from trainer.launch.endings import SMALLER
from trainer.models.memory import size_of
from trainer.models.recompute import runs_of
from trainer.modes.base import in_a_row, put_back
from trainer.recipe import Recipe
from trainer.recipe.checks import divides, piece_counts
from trainer.recipe.shares import given
from trainer.saving.checkpoint import checkpoints_in
from trainer.telemetry.device_memory import total_memory
from trainer.telemetry.readable import as_size
from trainer.training import snapshots
from trainer.training.parts import PARTS
from trainer.training.randomness import random_states, restore_random_states
from trainer.training.run import Run
from trainer.training.state import Resolved, TrainState

KEPT = "accumulate"  # the key in what the run folder keeps of what was chosen; there with accumulate=auto alone
AGAIN = 60.0  # seconds that a run trains before it takes smaller pieces once more: where it does not, they do not help


@contextmanager
def shortage_explained(resolved: Resolved, state: TrainState) -> Iterator[None]:
    """Raises DeviceMemoryError, with what to change, where memory runs out within this block."""
    try:
        yield
    except Exception as error:
        if isinstance(error, TrainerError) or not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(f"{needs(resolved, state)} ({text_of(error)[:200] or type(error).__name__})") from error


def needs(resolved: Resolved, state: TrainState) -> str:
    """What this run keeps on its device, and the keys that lower what a step takes beyond."""
    recipe, world, staged = resolved.recipe, resolved.world, resolved.recipe.traits.staged
    tensors = [tensor for kind in PARTS if kind.trains for tensor in kind(resolved, state).tensors().values()]
    tensors += [parameter for parameter in state.parameters.values() if parameter.requires_grad]  # their gradients
    # What fsdp.offload keeps on the host is not on the device that is full.
    resident = size_of(*(tensor for tensor in tensors if tensor.device.type == world.device.type))
    count = state.strategy.share.count
    pieces = range(recipe.pieces + 1, recipe.batch_size // count + 1)
    more = next((n for n in pieces if divides(recipe, count, n) and recipe.accumulate != "auto"), None)  # tried by it
    words = [f"accumulate={more} or more, which computes the same batch in smaller pieces"] * (more is not None)
    if more is not None and KEPT not in state.strategy.tuned and "accumulate=auto" not in recipe.traits.refuses:
        words += ["accumulate=auto, which finds their number"]
    if recipe.recompute is not True and recipe.graphs is not True:
        able = staged or bool(not recipe.compile and runs_of(state.strategy.module))
        words += ["recompute=true, which is slower"] * able
    if recipe.traits.exchanges == "shards" and state.strategy.home.type == "cuda" and recipe.precision != "fp16":
        words += ["fsdp.offload=true, which is slower"] * (world.size > 1)
    words += [f"a smaller number for rank {world.rank} in shares"] * bool(given(recipe))
    words += ["a smaller batch_size"]
    if KEPT in state.strategy.tuned and (number := twice(possible(resolved), recipe.pieces)) is not None:
        folder = resolved.tracker.path or recipe.output
        again = f"recipe={shlex.quote(str(folder))} output={shlex.quote(str(folder))}" if folder else "the same words,"
        words = [f"{again} resume=auto, as {SMALLER}, {number}", *words[-1:]]
    if not staged and recipe.traits.exchanges != "shards":
        words += ["for a model too big for one device, mode=fsdp or mode=pipeline with nproc=2"]
    has = f"which has {as_size(total_memory(world.device))}: weights, gradients and optimizer take {as_size(resident)}"
    return f"out of memory on {world.name}, {has}; type {', or '.join(words)}"


def possible(resolved: Resolved) -> list[int]:
    """All numbers of pieces that the batch, the ranks' shares and the data allow."""
    counts = []
    for number in piece_counts(resolved.recipe, resolved.share.count):
        with suppress(RecipeError):
            steps_per_epoch(len(resolved.datasets.train), resolved.recipe.replace(accumulate=number), resolved.share)
            counts.append(number)
    return counts


def twice(counts: list[int], before: int) -> int | None:
    """The first number that is at least twice as large."""
    return next((number for number in counts if number >= 2 * before), None)


@contextmanager
def repeatable(run: Run) -> Iterator[None]:
    """Held over passes: where memory runs out in them, a run that can go on in smaller pieces is as it was before.

    Ranks wait for each other's passes, so several cannot.
    """
    if KEPT not in run.strategy.tuned or run.world.size > 1:
        yield
        return
    before, drawn = [in_a_row(buffers) for buffers in run.buffers], random_states(run.world.drives)
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            for row, buffers in zip(before, run.buffers, strict=True):
                put_back(row, buffers)
            restore_random_states(drawn, run.world.drives)
            run.repeatable = True
        raise


def to_go_on(run: Run, error: BaseException, since: float) -> Recipe | None:
    """The recipe with which a run that ran out of memory goes on in this process, from its last step, or where that
    changed something before memory ran out, from its newest checkpoint. None where it ends.

    `since`: the time.monotonic() at which it did so before.
    """
    path = run.tracker.path
    short = isinstance(error, DeviceMemoryError) and KEPT in run.strategy.tuned and run.world.size == 1
    if not short or path is None or time.monotonic() - since < AGAIN:
        return None
    if (number := twice(possible(run.resolved), run.recipe.pieces)) is None:
        return None
    step, saved = run.state.position.step, "its newest checkpoint"
    run.state.optimizer.zero_grad()
    with suppress(TrainerError, RuntimeError, MemoryError):
        if run.repeatable:
            snapshots.save(run)
        snapshots.finish_saving(run)  # which also may be the one before
        saved = f"step {step}" if run.repeatable else saved
    if not checkpoints_in(path / "checkpoints"):
        return None
    run.tracker.say(f"out of memory after step {step}: goes on from {saved}, in {number} pieces of a batch")
    return run.recipe.replace(output=str(path), resume="auto", accumulate="auto")

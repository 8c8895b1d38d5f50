"""How much memory a run needs on its device, and which key to change if that is too much.

`accumulate=auto`: the fewest pieces of a batch whose passes fit every rank's device. They are found before the first
step by passes of zeros, from few images on to as many as fit. The run folder keeps their number for the same devices;
where memory ran out all the same, the run goes on, or the next attempt does, in twice as many.

`recompute=auto`: of how many first blocks a GPU's memory asks that activations are computed anew.
"""

from __future__ import annotations

import gc
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.data import Example, steps_per_epoch
from trainer.devices.precision import AUTOCAST
from trainer.errors import DeviceMemoryError, RecipeError, TrainerError, is_out_of_memory, text_of
from trainer.launch.endings import SMALLER, SMALLER_AFTER
from trainer.models import memory
from trainer.models.host_state import of_library
from trainer.models.memory import room_in, size_of
from trainer.models.recompute import recompute, runs_of
from trainer.models.shapes import without_values
from trainer.models.undisturbed import undisturbed
from trainer.modes.base import in_a_row, put_back
from trainer.modes.fsdp_units import teacher_share, unit_sizes, units_of
from trainer.recipe import Recipe
from trainer.recipe.checks import check_processes, divides, most_rows, piece_counts, weight_shards
from trainer.recipe.shares import given, rows_of
from trainer.saving.checkpoint import checkpoints_in
from trainer.telemetry.device_memory import forget_memory, free_memory, peak_memory, total_memory
from trainer.telemetry.readable import as_size, counted
from trainer.training import snapshots
from trainer.training.parts import PARTS
from trainer.training.randomness import random_states, restore_random_states
from trainer.training.run import Run
from trainer.training.state import Resolved, TrainState

KEPT = "accumulate"  # the key in what the run folder keeps of what was chosen; there with accumulate=auto alone


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
        able = staged or bool(runs_of(state.strategy.module))
        words += ["recompute=true, which is slower"] * able
    if recipe.traits.exchanges == "shards" and state.strategy.home.type == "cuda" and recipe.precision != "fp16":
        words += ["fsdp.offload=true, which is slower"] * (world.size > 1)
    words += [f"a smaller number for rank {world.rank} in shares"] * bool(given(recipe))
    few = recipe.accumulate == "auto" and len(possible(resolved)) < 3 and recipe.batch_size // (4 * count) * 4 * count
    less = f"batch_size={few}, which divides into more pieces" if 0 < few < recipe.batch_size else ""
    words += [less or "a smaller batch_size"]
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


def fewest(build: Callable[[Resolved], Run], resolved: Resolved) -> Run:
    """The run as `build` makes it; with accumulate=auto in so many pieces that the passes of a step fit. Collective.

    Raises:
        DeviceMemoryError: they do not in as many pieces as there can be.
    """
    recipe = resolved.recipe
    if recipe.accumulate != "auto":
        run = build(resolved)
        run.strategy.tuned.pop(KEPT, None)
        return run
    run = build(replace(resolved, recipe=recipe.replace(compile=False)))  # or each size would be compiled
    devices = [(device.type, total_memory(device)) for device in run.world.drives]
    purpose = f"{recipe.mode} {recipe.precision} {recipe.recompute} {recipe.shares} {run.world.size} x {devices}"
    number = _number(run, purpose)
    if number > 1 or recipe.compile:
        resolved = run.resolved  # recompute=auto as it was measured: for smaller pieces it might choose less
        run.loader.close()
        del run  # and with it what it has on the device
        gc.collect()
        torch.cuda.empty_cache()
        chosen = resolved.recipe.replace(accumulate=number, compile=recipe.compile)
        run = build(replace(resolved, recipe=chosen))
    run.strategy.tuned[KEPT] = {"pieces": number, "for": purpose}
    return run


def _number(run: Run, purpose: str) -> int:
    """Of pieces: what the run folder has for this purpose, else what fits."""
    world, counts, kept = run.world, possible(run.resolved), run.strategy.tuned.get(KEPT)
    before = kept.get("pieces") if isinstance(kept, Mapping) and kept.get("for") == purpose else None
    short, before = world.broadcast_object((str(run.tracker.journal.last_end).startswith("out of memory"), before))
    if before not in counts:
        return 1 if world.device.type == "cpu" else _largest_that_fits(run, counts)
    if not short:
        return int(before)
    if (number := twice(counts, before)) is None:
        raise DeviceMemoryError(needs(run.resolved, run.state))
    run.tracker.say(f"accumulate=auto: memory ran out in {counted(before, 'piece')}, now there are {number}")
    return number


def _largest_that_fits(run: Run, counts: list[int]) -> int:
    """The smallest number of pieces: from the smallest pieces on, while the next are expected to fit, and do. What a
    pass takes grows with its images no slower than from the one before."""
    measured, found = list[tuple[int, float]](), None
    share = run.strategy.share
    for number in reversed(counts):
        every = rows_of(run.recipe, share.count, number, share.numbers)
        rows = max(every)
        # BatchNorm wants more, and so many pieces are none to begin with, but where a batch divides into no others.
        if rows == 1 and number > counts[0] and (len(counts) > 2 or run.observer.model.batch_norm):
            continue
        if len(measured) > 1:
            (few, little), (more, much) = measured[-2:]
            if much + (much - little) / max(1, more - few) * (rows - more) > 1:
                break
        measured.append((rows, _load(run, every[share.index], min(2, number))))
        if measured[-1][1] > 1:
            break
        found = number
    if found is None:
        raise DeviceMemoryError(needs(run.resolved, run.state))
    return found


def _load(run: Run, rows: int, passes: int) -> float:
    """The part of its room that the fullest device of all ranks needs for passes of zeros, which leave no trace; above
    1 they do not fit. Collective."""
    strategy, drives, apart = run.strategy, run.world.drives, run.strategy.passes_apart
    own = any(not of_library(type(part)) for module in strategy.modules() for part in module.modules())
    load = 0.0
    forget_memory(drives)
    with undisturbed(strategy.modules(), *drives, weights=own):
        strategy.train()
        try:
            batch = strategy.context.example.zeros(run.world.device, rows, run.recipe.channels_last)
            for _ in range(passes):  # the second while the gradients of the first are there
                if run.teacher is not None:
                    run.teacher.teach(batch)
                strategy.forward_backward(batch, 1 / run.recipe.batch_size, sync=not apart)
        except Exception as error:
            if not apart or not is_out_of_memory(error):  # the others would wait for this rank
                raise
            load = math.inf
    if not apart:
        strategy.reduce_gradients()
    run.state.optimizer.zero_grad()
    share = run.world.sharing()
    for device in drives:
        room = room_in(free_memory(device) + share * torch.cuda.memory_reserved(device), share)
        load = max(load, peak_memory(device) / max(1.0, room))
    return float(run.world.max_(torch.tensor(load)))


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
    if not short or path is None or time.monotonic() - since < SMALLER_AFTER:
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


def settled(resolved: Resolved, model: nn.Module) -> Resolved:
    """The run with `recompute=auto` decided: of no block on the CPU. Collective.

    Raises:
        RecipeError: there are some, and the recipe has what does not go with that.
    """
    recipe, world, count = resolved.recipe, resolved.world, 0
    if recipe.recompute != "auto":
        return resolved
    if world.device.type == "cuda":
        weights, held = size_of(*model.parameters()), 0
        if resolved.teacher and recipe.traits.exchanges == "shards":  # else it is on the device already
            held = teacher_share(resolved.teacher.size, weights, weight_shards(recipe, world.size))
        room = room_in(free_memory(world.device), world.sharing(), held)
        example = resolved.datasets.example(most_rows(recipe, resolved.share.count))
        count = blocks_needed(model, recipe, example, room, world.size)
    count = int(world.max_(torch.tensor(count)).item())
    recipe = recipe.replace(recompute=count > 0)
    check_processes(recipe, world.size)
    return replace(resolved, recipe=recipe, recomputed=count)


def blocks_needed(model: nn.Module, recipe: Recipe, example: Example, room: float, processes: int) -> int:
    """The fewest first blocks with which a step takes at most `room` bytes, else all; none where shapes do not tell."""
    parts, runs = weight_shards(recipe, processes), runs_of(model)

    def fits(count: int) -> bool:
        copy, precision = without_values(model).train(), AUTOCAST.get(recipe.precision)
        recompute(copy, runs[:count], random=False)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", precision, enabled=bool(precision)):
            copy._apply(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype))  # type: ignore[no-untyped-call]
            inputs = example.zeros(torch.device("cpu"), channels_last=recipe.channels_last).inputs
            needed: float = memory.of_module(copy, copy, inputs).peak + size_of(inputs)
        weights = size_of(*copy.parameters())
        if parts > 1:  # what ranks gather of each other's
            rest, *units = unit_sizes(copy, units_of(copy))
            needed += min(weights, rest + 3 * max(units, default=0))
        return needed + weights * (memory.COPIES + (recipe.ema is not None)) / parts <= room

    try:
        return memory.fewest(len(runs), fits)
    except (RuntimeError, NotImplementedError, AssertionError, ValueError, TypeError, LookupError):
        return 0

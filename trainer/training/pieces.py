"""`accumulate=auto`: the fewest pieces of a batch whose passes fit every rank's device.

They are found before the first step by passes of zeros, from few images on to as many as fit. The run folder keeps
their number for the same devices; where memory ran out all the same, the next attempt takes twice as many.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from trainer.errors import DeviceMemoryError, is_out_of_memory
from trainer.models.host_state import of_library
from trainer.models.memory import room_in
from trainer.models.undisturbed import undisturbed
from trainer.recipe.shares import rows_of
from trainer.telemetry.device_memory import forget_memory, free_memory, peak_memory, total_memory
from trainer.telemetry.readable import counted
from trainer.training.memory_needs import KEPT, needs, possible, twice
from trainer.training.run import Run
from trainer.training.state import Resolved


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
        if rows == 1 and number > counts[0]:  # BatchNorm wants more, and so many pieces are none to begin with
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

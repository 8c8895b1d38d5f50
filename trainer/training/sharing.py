"""`shares=auto`: dividing every batch by the speeds that the run measures of its ranks.

All ranks have the same figures, and decide the same. In the first steps shares change as soon as these are measured:
the order of images is one for all shares, so that a step is that of any others. Workers that each have images of their
own begin with new ones at the next epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from trainer.data.sampling import contiguous_span
from trainer.models.memory import room_in
from trainer.recipe.shares import bounded, rows_of, units
from trainer.telemetry.device_memory import peak_memory, total_memory
from trainer.telemetry.rank_watch import RankWatch
from trainer.training.run import Run


def divided(run: Run, begins: bool) -> bool:
    """Whether ranks compute other parts of a batch from here on, where an epoch `begins` or has steps left.
    Collective."""
    strategy, share, shares = run.strategy, run.strategy.share, run.noticed.shares
    if shares is None or (share.every_sample and not begins):
        return False
    rows = rows_of(run.recipe, share.count, numbers=share.numbers)
    divide = partial(_possible, run, rows)
    wanted = shares.first(rows, divide) or (shares.lasting(rows, divide) if begins else None)
    if wanted is None or wanted == rows:
        return False
    _tell(run, rows, wanted, shares.speeds)
    strategy.divide(replace(share, numbers=tuple(wanted)))
    strategy.context = replace(strategy.context, example=replace(strategy.context.example, rows=wanted[share.index]))
    run.loader.divide(strategy.share.numbers)
    run.steps.forget()
    run.forward.close()
    run.noticed.ranks = RankWatch()
    run.timer.start()
    return True


def _possible(run: Run, rows: Sequence[int], speeds: Sequence[float]) -> list[int]:
    """Rows of each rank in proportion to its speed, as far as its device holds them. Collective."""
    recipe, together = run.recipe, run.recipe.augment.together
    alone = 2 if run.observer.model.batch_norm else 1  # statistics want more than one image
    least = min(max(1, alone // together), min(rows) // together)
    held = run.world.broadcast_object(run.world.gather(_most(run, rows[run.world.rank])))
    most = [max(now, rows) // together for now, rows in zip(rows, held, strict=True)]
    wanted = [together * part for part in bounded(units(recipe), speeds, least, most)]
    samples, steps = len(run.datasets.train), run.resolved.steps_per_epoch
    if run.strategy.share.every_sample:  # each worker has an image for each micro-batch
        spans = [contiguous_span(samples, rank, len(rows), wanted) for rank in range(len(rows))]
        if min(stop - start for start, stop in spans) < steps * recipe.pieces:
            return list(rows)
    return wanted


def _most(run: Run, rows: int) -> int:
    """Images of a micro-batch that this rank's device has room for, by what `rows` of them took; on a CPU all, as ranks
    divide its memory whatever their shares."""
    device, world = run.world.device, run.world
    if device.type != "cuda":
        return run.recipe.batch_size
    resident = torch.cuda.memory_allocated(device)
    return most_held(total_memory(device), world.sharing(), resident, peak_memory(device), rows)


def most_held(memory: int, sharing: int, resident: int, peak: int, rows: int) -> int:
    """Images that a device of so much memory holds, where `rows` of them took `peak` bytes, `resident` ones among."""
    each = max(1.0, (peak - resident) / rows)
    return max(rows, int(room_in(memory, sharing, resident) / each))


def _tell(run: Run, rows: Sequence[int], wanted: Sequence[int], speeds: Sequence[float]) -> None:
    """One line, of the slowest rank and all shares."""
    names, pieces = run.world.devices, run.recipe.pieces
    slow, fast = speeds.index(min(speeds)), speeds.index(max(speeds))
    shares = " + ".join(str(pieces * each) for each in wanted)
    run.tracker.say(
        f"  shares: {names[slow]} is {speeds[slow] / speeds[fast]:.2g} times as fast as {names[fast]}: of "
        f"{run.recipe.batch_size} images it gets {pieces * wanted[slow]} in place of {pieces * rows[slow]} ({shares})"
    )
    run.tracker.journal.notice(f"step {run.state.position.step}: shares {shares}")

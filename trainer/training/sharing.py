"""`shares=auto`: divide every batch in proportion to the measured speeds of the ranks.

All ranks have the same measurements and make the same decision. In the first steps the shares
change as soon as speeds are measured, because the images of a step do not depend on the shares. If
every worker has its own images, the shares change only at the start of an epoch.
"""

from collections.abc import Sequence

import torch

from trainer.data.sampling import compute_span
from trainer.memory.device import peak_memory, total_memory
from trainer.memory.needs import count_fitting_images
from trainer.recipe.shares import count_units, divide_within_limits
from trainer.training.observer import Observer
from trainer.training.state import Resolved, TrainState


def choose_rows(
    resolved: Resolved, state: TrainState, observer: Observer, epoch_begins: bool
) -> list[int] | None:
    """Choose how many rows each rank computes, if measured speeds suggest a change. Collective.

    Called when an epoch begins, and between steps of an epoch that has steps left.

    Returns:
        The number of rows of a micro-batch that each rank computes from now on, or None if nothing
        changes.
    """
    recipe = resolved.recipe
    share = state.strategy.share
    watch = observer.noticed.shares
    if watch is None or (share.every_sample and not epoch_begins):
        return None
    rows = share.count_rows(recipe)
    world = resolved.world
    # Number of images that augmentations such as mixup combine. The number of rows of each rank is
    # a multiple of this number.
    together = recipe.augment.together
    # Batch statistics need more than one image.
    minimum = 2 if observer.model.batch_norm else 1
    least = min(max(1, minimum // together), min(rows) // together)

    def divide(speeds: Sequence[float]) -> list[int]:
        """Return each rank's rows in proportion to its speed, limited by its memory. Collective."""
        # On CPUs the global batch size is no limit, because all ranks use the same memory.
        capacity = recipe.batch_size
        if world.device.type == "cuda":
            # Extrapolate from the memory that the present rows have needed.
            memory = total_memory(world.device)
            resident = torch.cuda.memory_allocated(world.device)
            peak = peak_memory(world.device)
            own_rows = rows[world.rank]
            capacity = count_fitting_images(memory, world.sharing(), resident, peak, own_rows)
        capacities = world.broadcast_object(world.gather(capacity))
        most = [max(pair) // together for pair in zip(capacities, rows, strict=True)]
        numbers = divide_within_limits(count_units(recipe), speeds, least, most)
        new_rows = [together * number for number in numbers]
        # A worker with its own images needs at least one for each micro-batch of an epoch.
        # Otherwise the rows stay as they are.
        if share.every_sample:
            samples = len(resolved.datasets.train)
            needed = resolved.steps_per_epoch * recipe.pieces
            for rank in range(len(rows)):
                start, stop = compute_span(samples, rank, len(rows), new_rows)
                if stop - start < needed:
                    return rows
        return new_rows

    new_rows = watch.first(rows, divide)
    if not new_rows and epoch_begins:
        new_rows = watch.lasting(rows, divide)
    if not new_rows or new_rows == rows:
        return None
    shares = " + ".join(str(recipe.pieces * rank_rows) for rank_rows in new_rows)
    names = world.devices
    slow = watch.speeds.index(min(watch.speeds))
    fast = watch.speeds.index(max(watch.speeds))
    ratio = watch.speeds[slow] / watch.speeds[fast]
    resolved.tracker.say(
        f"  shares: {names[slow]} is {ratio:.2g} times as fast as {names[fast]}: "
        f"of {recipe.batch_size} images it gets {recipe.pieces * new_rows[slow]} "
        f"instead of {recipe.pieces * rows[slow]} ({shares})"
    )
    resolved.tracker.journal.notice(f"step {state.position.step}: shares {shares}")
    return new_rows

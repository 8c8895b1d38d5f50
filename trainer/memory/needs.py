"""Compute the memory that several passes, or the shards of a model, need on a device."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from trainer.memory.device import compute_usable_bytes
from trainer.memory.measuring import Pass, count_bytes

# Estimated memory of weights, gradients and optimizer state, as a multiple of the weights. It is
# used before the optimizer is built. Most optimizers keep at most two tensors for each weight.
COPIES = 4
# Minimum number of elements that local SGD averages in one all-reduce, except in the last one. The
# all-reduce copies the elements, and a copy of this size is small compared to most models.
BUCKET = 2**24


def find_fewest(
    most: int,
    fits: Callable[[int], bool],
) -> int:
    """Return the smallest number from 0 to `most` that fits, or `most` if no number fits.

    Args:
        most: The largest number.
        fits: Function that returns whether a number fits. If a number fits, all larger numbers must
            fit, too.
    """
    if fits(0):
        return 0
    return min(most, 1 + bisect_left(range(1, most), True, key=fits))


def find_fewest_pieces(
    rows: dict[int, int],
    measure_load: Callable[[int], float],
    batch_norm: bool,
) -> int | None:
    """Return the smallest number of micro-batches whose passes fit the memory.

    The smallest micro-batches are tried first, then larger ones until they do not fit, or until the
    next larger ones are not expected to fit. This estimate assumes that memory grows with the
    number of rows at least as fast as between the last two trials.

    Args:
        rows: Number of rows of a micro-batch by the number of micro-batches. The numbers of
            micro-batches are in ascending order.
        measure_load: Function that runs passes with a number of micro-batches and returns their
            memory as a fraction of the available memory. If it is larger than 1, they do not fit.
        batch_norm: Whether the model needs more than one row for its batch statistics.

    Returns:
        The number of micro-batches; None if no number fits.
    """
    # Number of rows in each trial, and the result of `measure_load`.
    measured: list[tuple[int, float]] = []
    fitting = None
    for number, count in reversed(rows.items()):
        # Skip micro-batches of one row, unless the whole batch is one row: BatchNorm needs more
        # rows. Without BatchNorm, one row is a poor first trial, but it is skipped only if there
        # are sizes between one row and the whole batch.
        is_skipped = len(rows) > 2 or batch_norm
        if count == 1 and number > min(rows) and is_skipped:
            continue
        if len(measured) > 1:
            (fewer_rows, lower_load), (more_rows, higher_load) = measured[-2:]
            slope = (higher_load - lower_load) / max(1, more_rows - fewer_rows)
            if higher_load + slope * (count - more_rows) > 1:
                break
        load = measure_load(number)
        measured.append((count, load))
        if load > 1:
            break
        fitting = number
    return fitting


def measure_peak(
    actions: Iterable[tuple[str, int, int]],
    stages: Sequence[Pass],
) -> int:
    """Return the peak memory in bytes of the activations of a pipeline's worker.

    Args:
        actions: The worker's actions (`modes.pipeline.orders.Action`) in their order.
        stages: Memory of a micro-batch's pass through each stage of the model.
    """
    live = peak = 0
    for kind, stage, _ in actions:
        memory = stages[stage]
        if kind == "F":
            peak = max(peak, live + memory.received + memory.forward)
            live += memory.received + memory.saved
        else:
            peak = max(peak, live + memory.peak - memory.saved)
            # "I" computes only the gradients of the inputs. A later action computes the gradients
            # of the weights from the same activations, so they stay allocated until then.
            if kind != "I":
                live -= memory.received + memory.saved
    return peak


def compute_unit_sizes(
    model: nn.Module,
    units: Sequence[str],
) -> list[int]:
    """Return the size in bytes of the parameters outside of all FSDP units, then of each unit."""
    sizes = [count_bytes(*model.get_submodule(name).parameters()) for name in units]
    return [count_bytes(*model.parameters()) - sum(sizes), *sizes]


def count_gathered(sizes: Sequence[int]) -> int:
    """Return the maximum number of bytes that a pass of FSDP keeps gathered at a time.

    The parameters outside of all units stay gathered. In addition, at most two units, and the
    gradients of a third unit, are gathered at the same time.

    Args:
        sizes: The return value of `compute_unit_sizes`.
    """
    root, *units = sizes
    return min(sum(sizes), root + 3 * max(units, default=0))


def count_teacher_bytes(
    teacher: int,
    student: int,
    parts: int,
) -> int:
    """Return the size in bytes of a teacher's weights, or of their shard, on each rank.

    The teacher is sharded if it is larger than a rank's shard of the student's weights, gradients
    and optimizer state, which `COPIES` estimates.

    Args:
        teacher: Size of the teacher's weights in bytes.
        student: Size of the student's parameters in bytes.
        parts: Number of shards.
    """
    if teacher * parts > COPIES * student:
        return -(-teacher // parts)
    return teacher


def count_fitting_images(
    memory: int,
    sharing: int,
    resident: int,
    peak: int,
    rows: int,
) -> int:
    """Estimate the maximum number of images of a micro-batch that fit a device, at least `rows`.

    Args:
        memory: Memory of the device in bytes.
        sharing: Number of ranks that share the device.
        resident: Size in bytes of the tensors that do not depend on the number of images.
        peak: Peak memory in bytes with `rows` images, including `resident`.
        rows: Number of images of a micro-batch that is known to fit.
    """
    per_row = max(1.0, (peak - resident) / rows)
    return max(rows, int(compute_usable_bytes(memory, sharing, resident) / per_row))

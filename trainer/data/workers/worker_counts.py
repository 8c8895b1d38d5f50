"""Number of loader workers per rank, from the numbers of cores and open files, and the memory."""

import resource

from trainer.devices import host
from trainer.memory.device import free_shared_memory
from trainer.processes.resources import count_cores

# Maximum number of batches that one worker reads ahead.
PREFETCH = 2
# Number of file descriptors to reserve per worker, twice what a worker opens.
DESCRIPTORS_PER_WORKER = 16
# Fraction of the free memory and shared memory, whichever is less, that the workers of all ranks
# may use if the user does not set data.workers.
USABLE_FRACTION = 0.5


def slots(workers: int) -> int:
    """Return the number of batch slots: `PREFETCH` per worker, and one for the batch in use."""
    return workers * PREFETCH + 1 if workers else 1


def allowed(readers: int, batch_bytes: int) -> int:
    """Return the number of workers that one rank may start.

    A worker needs a core, file descriptors, and shared memory for its batches. Shared memory counts
    as memory, because a container's memory limit includes it.

    Args:
        readers: number of ranks of this machine that read data.
        batch_bytes: size of one batch in bytes; 0 if unknown.
    """
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    count = count_cores() // readers
    # A limit of -1 means unlimited.
    if descriptors > 0:
        count = min(count, descriptors // DESCRIPTORS_PER_WORKER)
    count = max(1, count)
    free = free_shared_memory()
    if free is None or not batch_bytes:
        return count
    usable_bytes = min(free, host.free_memory()) * USABLE_FRACTION
    batches = int(usable_bytes / (readers * batch_bytes))
    return max(1, min(count, (batches - 1) // PREFETCH))

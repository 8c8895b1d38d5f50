"""How many processes read photos for a rank: from cores, ranks and memory."""

from __future__ import annotations

import os
import resource

from trainer.devices import host
from trainer.errors import SetupError
from trainer.processes.resources import cores

PREFETCH = 2  # batches that a worker has been asked for
SHARED_MEMORY = "/dev/shm"
FILES = 16  # file descriptors for each worker; it opens half as many
FRACTION = 0.5  # of the free shared memory that workers take, unless the user says how many there are


def slots(workers: int) -> int:
    """Slots for batches: those asked for, and the one in use."""
    return workers * PREFETCH + 1 if workers else 1


def free_shared_memory(folder: str = SHARED_MEMORY) -> int | None:
    """Bytes; None where there is no such folder."""
    if not os.path.isdir(folder):
        return None
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def check_shared_memory(needed: int, folder: str = SHARED_MEMORY) -> None:
    """Refuse to start what would end in SIGBUS later. Raises SetupError."""
    free = free_shared_memory(folder)
    if free is not None and free < needed:
        raise SetupError(
            f"loader workers need {needed / 2**20:.0f} MiB of shared memory, {folder} has {free / 2**20:.0f} free: "
            f"use fewer data.workers (data.workers=0 needs none), "
            f"or start the container with --shm-size={-(-needed // 2**30)}g or more"
        )


def allowed(readers: int, batch_bytes: int) -> int:
    """Workers of one rank where `readers` ranks of this machine read: a core each, and files and memory for them.

    Shared memory counts as memory: it is limited by a container's free memory, too.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    each = max(1, min(cores() // readers, files // FILES if files > 0 else cores()))  # -1 is no limit
    free = free_shared_memory()
    if free is None or not batch_bytes:
        return each
    room = int(min(free, host.free_memory()) * FRACTION / (readers * batch_bytes))
    return max(1, min(each, (room - 1) // PREFETCH))

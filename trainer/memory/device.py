"""Peak, free and total memory of a device, and free shared memory (/dev/shm), in bytes."""

import gc
import os
import resource
import shutil
import sys
from collections.abc import Sequence

import torch

from trainer.devices import host
from trainer.errors import SetupError

# Fraction of a device's memory that a run may allocate. The remaining memory is for the CUDA
# context, workspaces of libraries and fragmentation.
USABLE = 0.9
# Directory of the shared memory through which loader workers pass batches.
SHARED_MEMORY = "/dev/shm"


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this rank in bytes.

    On CUDA, this is the peak of torch's allocations on `device`. On CPU, it is the peak resident
    set size of the process.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        # Between replays, torch counts the memory of CUDA graphs as free, although the graphs keep
        # it. If a graph has been captured, count all memory that torch has reserved.
        for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
            pool = tuple(segment.get("segment_pool_id", (0, 0)))
            if segment["device"] == index and pool != (0, 0):
                return max(peak, torch.cuda.memory_reserved(device))
        return peak
    # ru_maxrss is in bytes on macOS and in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_memory(devices: Sequence[torch.device]) -> None:
    """Release the memory that torch caches, and reset torch's peaks to the memory in use."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def release_garbage() -> None:
    """Collect reference cycles, and return the unused memory that torch caches to the GPUs."""
    gc.collect()
    torch.cuda.empty_cache()


def free_memory(device: torch.device) -> int:
    """Return the free memory of a device in bytes.

    On CPU, this is the free memory of the machine, or of the control group of this process if that
    is less.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host.free_memory()


def total_memory(device: torch.device) -> int:
    """Return the total memory of a device in bytes.

    On CPU, this is the memory limit of this process's control group, if any, or else the memory of
    the machine.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return host.memory_limit() or host.total_memory()


def compute_usable_bytes(
    memory: float,
    sharing: int = 1,
    resident: float = 0.0,
) -> float:
    """Return the number of bytes that a rank may still allocate on a device.

    Args:
        memory: Memory of the device in bytes.
        sharing: Number of ranks that share the device.
        resident: Number of bytes that the rank has allocated.
    """
    return USABLE * memory / sharing - resident


def free_shared_memory() -> int | None:
    """Return the free bytes of the shared memory; None if its directory does not exist."""
    if not os.path.isdir(SHARED_MEMORY):
        return None
    return shutil.disk_usage(SHARED_MEMORY).free


def check_shared_memory(needed: int) -> None:
    """Check before loader workers start that the shared memory is large enough for them.

    A worker that writes beyond the end of the shared memory is killed by SIGBUS.

    Args:
        needed: Number of bytes that the workers will allocate.

    Raises:
        SetupError: The shared memory is too small.
    """
    free = free_shared_memory()
    if free is not None and free < needed:
        raise SetupError(
            f"loader workers need {needed / 2**20:.0f} MiB of shared memory, {SHARED_MEMORY} has "
            f"{free / 2**20:.0f} free: use fewer data.workers (data.workers=0 needs none), "
            f"or start the container with --shm-size={-(-needed // 2**30)}g or more"
        )

"""Bytes of a device: held at most, still free, all there are."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence

import torch

from trainer.devices import host


def peak_memory(device: torch.device) -> int:
    """Most bytes this rank has held: torch's allocations on CUDA, the process's resident set on CPU.

    Where graphs are recorded, all that torch has of the card: their memory stays theirs, and counts as free in between.
    """
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        own = (segment.get("segment_pool_id", (0, 0)) for segment in segments if segment["device"] == index)
        graphs = any(tuple(pool) != (0, 0) for pool in own)
        return max(most, torch.cuda.memory_reserved(device)) if graphs else most
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_memory(devices: Sequence[torch.device]) -> None:
    """Give back the memory that torch keeps for later, and begin its peaks anew: what was tried is no training."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on the device; on CPU what the machine and the control group leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host.free_memory()


def total_memory(device: torch.device) -> int:
    """Bytes that the device has; on CPU those of the machine, or of the control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return host.memory_limit() or host.total_memory()

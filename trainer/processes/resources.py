"""What a process may use of this machine: cores, threads, devices, freed memory. Imports no torch at its top."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Literal

from trainer.devices import cards, health
from trainer.devices.assignment import assign_devices, numbered
from trainer.errors import TrainerError
from trainer.processes.family import PARENT
from trainer.processes.rank import place
from trainer.processes.world import World
from trainer.recipe import Recipe

PHOTOS = 2**25  # bytes: the largest that glibc can be told; a photo of 11 megapixels


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cuda_count() -> int:
    """CUDA devices torch can use. Raises SetupError or RecipeError where cards are here that torch cannot use."""
    installed = cards.detect()
    if installed.fault is not None:
        raise installed.fault
    return installed.count


def cuda_for(devices: Sequence[str] | Literal["auto"]) -> int:
    """CUDA devices torch can use, for one who wants `devices`: the CPU asks for none, and who names cards does not
    mind that others cannot be used."""
    if devices != "auto" and all(name == "cpu" for name in devices):
        return 0
    try:
        return cuda_count()
    except TrainerError:
        if devices != "auto" and (count := cards.detect().count):
            return count
        raise


def cuda_wanted(recipe: Recipe) -> int:
    """CUDA devices torch can use, for a recipe; none where the weights are in the CPU's memory."""
    return 0 if recipe.traits.shared_memory and recipe.devices == "auto" else cuda_for(recipe.devices)


def threads_per_process(recipe: Recipe, local_size: int, environment: Mapping[str, str] = os.environ) -> int:
    """The recipe's `threads`, else the user's OMP_NUM_THREADS, else cores / local ranks.

    torchrun sets OMP_NUM_THREADS=1 by itself, so 1 under a torchrun that we did not start counts as unset.
    """
    if recipe.threads:
        return recipe.threads
    chosen = environment.get("OMP_NUM_THREADS", "")
    torchruns = chosen == "1" and "TORCHELASTIC_RUN_ID" in environment and PARENT not in environment
    if chosen.isdigit() and int(chosen) > 0 and not torchruns:
        return int(chosen)
    return max(1, cores() // local_size)


def locate(recipe: Recipe) -> World:
    """Take this process's place: its device and its threads.

    Raises:
        RecipeError: other devices than the mode can use.
        SetupError: a card that this torch cannot use, or copies between its cards that come out wrong.
    """
    import torch

    me = place()
    cuda = cuda_wanted(recipe)
    assigned = assign_devices(recipe, me.local_size, cuda, me.size // me.local_size)
    drives = tuple(map(torch.device, assigned[me.local_rank]))
    device = drives[0]
    threads = threads_per_process(recipe, me.local_size)
    torch.set_num_threads(threads)
    if device.type == "cuda":
        for card in dict.fromkeys(drives):
            health.check_card(card, cuda)
        torch.cuda.set_device(device)
        health.check_copies(health.edges([drive for drive in drives if drive.type == "cuda"]))
    shared = device.type == "cuda" and len(set(assigned)) < len(assigned)
    world = World(me, device, threads, (), drives, shared)
    world.devices = (world.name,) if len(drives) == 1 else tuple(numbered(drives))
    return world


def keep_freed_memory(largest: int | None = None) -> None:
    """Let glibc's malloc keep big blocks for the next ones; by default it gives them back to the kernel.

    Which then clears every page of the next one: on a CPU 6 to 14 % of a training step, and up to half of the time in
    which a photo is decoded. Blocks of more than `largest` bytes go back all the same; None: none do.
    """
    m_trim_threshold, m_mmap_threshold, m_mmap_max = -1, -3, -4
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
        if largest is None:
            libc.mallopt(m_mmap_max, 0)  # no block a mapping of its own, which would go back when freed
        else:
            libc.mallopt(m_mmap_threshold, largest)
    except (OSError, AttributeError):
        return  # another C library: nothing to tune

"""Resources of this machine that a process may use: cores, threads, devices and memory.

The module does not import torch at its top, because start-up code uses it.
"""

import ctypes
import os
from collections.abc import Sequence
from typing import Literal

from trainer.devices import cards, host
from trainer.processes.family import PARENT
from trainer.recipe import Recipe

# Processes that decode photos keep freed blocks of up to this number of bytes for reuse. Larger
# blocks return to the kernel. This is the largest threshold that glibc accepts, and enough for a
# photo of 11 megapixels.
MAX_KEPT_BLOCK = 2**25


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(host.list_cores())


def count_cuda_devices(devices: Sequence[str] | Literal["auto"] = "auto") -> int:
    """Return the number of CUDA devices that torch can use.

    Args:
        devices: requested devices. The result is 0 if all of them are the CPU.

    Raises:
        SetupError, RecipeError: torch cannot use a GPU of this machine. If the user has requested
            certain GPUs, this is an error only if torch cannot use any.
    """
    if devices != "auto" and all(name == "cpu" for name in devices):
        return 0
    installed = cards.detect()
    if installed.fault is not None and (devices == "auto" or not installed.count):
        raise installed.fault
    return installed.count


def count_requested_cuda(recipe: Recipe) -> int:
    """Return the number of CUDA devices that a recipe may use.

    Modes that share weights in host memory use GPUs only if the recipe names them.
    """
    if recipe.traits.shared_memory and recipe.devices == "auto":
        return 0
    return count_cuda_devices(recipe.devices)


def choose_threads(recipe: Recipe, local_size: int) -> int:
    """Return the number of CPU threads for each process.

    The result is `threads` of the recipe, else OMP_NUM_THREADS, else the number of cores divided by
    `local_size`. torchrun itself sets OMP_NUM_THREADS=1, so the value 1 is ignored under a torchrun
    that the user has started.

    Args:
        recipe: recipe of the run.
        local_size: number of ranks on this machine.
    """
    if recipe.threads:
        return recipe.threads
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    is_under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and PARENT not in os.environ
    is_torchruns_choice = chosen == "1" and is_under_torchrun
    if chosen.isdigit() and int(chosen) > 0 and not is_torchruns_choice:
        return int(chosen)
    return max(1, count_cores() // local_size)


def spin_briefly() -> None:
    """Let idle OpenMP threads release their cores sooner, unless the user has chosen a policy.

    Call this before torch is loaded.

    Idle threads of GNU OpenMP spin 300,000 times, which takes milliseconds. On a machine that other
    processes use, the spinning threads occupy the core that the thread they wait for needs.
    Measured with a tiny net and two threads on two cores: next to ten busy processes, training with
    10,000 spins is 2.4 to 6.5 times as fast as with the default. On an idle machine, 10,000 spins
    are as fast as the default, 1,000 spins reach 0.8 times its speed, and no spins 0.55 times.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def keep_freed_memory(largest: int | None = None) -> None:
    """Make the `malloc` of glibc keep large freed blocks of memory and reuse them.

    By default, `malloc` returns a large freed block to the kernel, and the kernel clears every page
    of the next large block. Clearing takes 6 to 14 % of a training step on a CPU, and up to half of
    the time for decoding a photo.

    Args:
        largest: maximum size in bytes of a block that is kept. None keeps all blocks.
    """
    m_trim_threshold = -1
    m_mmap_threshold = -3
    m_mmap_max = -4
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
        if largest is None:
            # No block gets its own mapping, which would be unmapped when the block is freed.
            libc.mallopt(m_mmap_max, 0)
        else:
            libc.mallopt(m_mmap_threshold, largest)
    except (OSError, AttributeError):
        # Other C libraries do not have `mallopt`, so nothing is changed.
        return

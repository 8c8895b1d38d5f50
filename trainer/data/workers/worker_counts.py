"""How many processes read photos for a rank: from cores, ranks and memory, and as measured while it trains."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import torch

from trainer.devices import host
from trainer.errors import SetupError
from trainer.processes.world import cores
from trainer.recipe import Recipe

PREFETCH = 2  # batches that a worker has been asked for
SHARED_MEMORY = "/dev/shm"
FILES = 16  # that a process may open for each worker: it opens half as many
SHARE = 0.5  # of the shared memory that is free: what nobody asked for by number takes no more

SECONDS = 1.0  # that a measurement takes at least
KEEPS_UP = 0.03  # of the time: readers for which nobody waits longer are enough
SPARE = 1.25  # times as many workers as were busy, for batches that take longer than others
GROWTH = 1.5
PAYS = 1.05  # how much faster more workers must make it


def slots(workers: int) -> int:
    """Batches that are being filled or used at once: those asked for, and the one in use."""
    return workers * PREFETCH + 1 if workers else 1


def free_shared_memory(folder: str = SHARED_MEMORY) -> int | None:
    """Bytes; None where there is no such folder to run out of."""
    if not os.path.isdir(folder):
        return None
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def check_shared_memory(needed: int, folder: str = SHARED_MEMORY) -> None:
    """Refuse to start what would die of a bus error later.

    Raises:
        SetupError: less than `needed` bytes of shared memory are free.
    """
    free = free_shared_memory(folder)
    if free is not None and free < needed:
        raise SetupError(
            f"loader workers need {needed / 2**20:.0f} MiB of shared memory, {folder} has {free / 2**20:.0f} free: "
            f"use fewer data.workers (data.workers=0 needs none), "
            f"or start the container with --shm-size={-(-needed // 2**30)}g or more"
        )


def allowed(readers: int, batch_bytes: int) -> int:
    """Workers of one rank where `readers` ranks of this machine read: a core each, and files and memory for them.

    Shared memory is memory: a container that is left less than it has of shared memory would be killed.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # of this process
    each = max(1, min(cores() // readers, files // FILES if files > 0 else cores()))  # no limit is told as -1
    free = free_shared_memory()
    if free is None or not batch_bytes:
        return each
    room = int(min(free, host.free_memory()) * SHARE / (readers * batch_bytes))
    return max(1, min(each, (room - 1) // PREFETCH))


def here(readers: int, device: torch.device, recipe: Recipe) -> dict[str, Any]:
    """Where a number of workers was found: it is that of such a machine, and of such a pace."""
    return {
        "cores": cores(),
        "readers": readers,
        "device": device.type,
        "mode": recipe.mode,
        "root": recipe.data.root,
        "cache": recipe.data.cache,
        "batch_size": recipe.batch_size,
    }


class Search:
    """Finds, while a rank trains, how few workers keep up with it.

    It looks at stretches of about a second. Where nobody waited, as many stay as were busy, and some to spare. Where
    somebody did, more are tried, and kept if that made it faster: what waits for a disk has use for more than cores.
    Two stretches in a row have to say that fewer are enough: within one a checkpoint may be saved, or nobody be awake.

    Attributes:
        count: workers that there are to be.
        searches: whether that is searched for at all.
        settled: whether that is what was found, or asked for; nothing changes any more.
        waited, read: seconds of this stretch in which batches were waited for, and of all workers' reading.
    """

    def __init__(self, count: int, most: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        """Without `most` it stays at `count`."""
        self.count, self.most, self._clock = count, most or count, clock
        self.searches = most is not None
        self.settled = not self.searches
        self._enough: int | None = None  # what the stretch before found
        self._before: tuple[int, float] | None = None  # a smaller number, and batches a second with that
        self._begin()

    def _begin(self) -> None:
        """A stretch begins once the batches are used that had been read before."""
        self._skip, self._batches, self._seconds = slots(self.count), 0, 0.0
        self.waited = self.read = 0.0
        self._last: float | None = None
        self._counted = 0.0, 0.0

    def pause(self) -> None:
        """What happens until the next batch, as an evaluation does, is no part of the stretch."""
        self._last = None

    def batch(self) -> int:
        """One more batch was used; returns how many workers there are to be."""
        if self.settled:
            return self.count
        now = self._clock()
        if self._skip:
            self._skip -= 1
        elif self._last is not None:
            self._batches += 1
            self._seconds += now - self._last
            self._counted = self.waited, self.read
        self._last, (self.waited, self.read) = now, self._counted
        if self._seconds >= SECONDS and self._batches >= 2 * self.count:
            self._decide(self._seconds)
            self._begin()
        return self.count

    def _decide(self, seconds: float) -> None:
        waits, rate, before = self.waited > KEEPS_UP * seconds, self._batches / seconds, self._before
        enough = None
        if not waits:
            enough = max(1, min(self.count, math.ceil(SPARE * self.read / seconds)))
        elif before is not None and rate < PAYS * before[1]:
            enough = before[0]
        elif self.count == self.most:
            self.settle(self.most)
        else:
            self._before = self.count, rate
            self.count = min(self.most, math.ceil(GROWTH * self.count))
        if enough is not None and self._enough is not None:
            self.settle(max(enough, self._enough))
        self._enough = enough

    def settle(self, count: int) -> None:
        """So many it is."""
        self.count, self.settled = count, True

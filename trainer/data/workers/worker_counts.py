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
from trainer.processes.resources import cores
from trainer.recipe import Recipe

PREFETCH = 2  # batches that a worker has been asked for
SHARED_MEMORY = "/dev/shm"
FILES = 16  # file descriptors for each worker; it opens half as many
FRACTION = 0.5  # of the free shared memory that workers take, unless the user says how many there are

SECONDS = 1.0  # of a measurement, at least
KEEPS_UP = 0.03  # of the time may be spent waiting for batches
SPARE = 1.25  # times as many workers as were busy, for batches that take longer than others
GROWTH = 1.5
PAYS = 1.05  # how much faster more workers must make it


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


def conditions(readers: int, device: torch.device, recipe: Recipe) -> dict[str, Any]:
    """Under which a number of workers was measured: where they are the same, it need not be measured again."""
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
    """Measures, while a rank trains, how few workers keep up with it.

    Each measurement takes about a second. Where training did not wait for batches, as many workers stay as were busy,
    and some to spare. Where it did, more are tried, and kept if that made it faster: what waits for a disk can use more
    workers than cores. Two measurements in a row have to say that fewer are enough: a checkpoint may be saved in one.

    Attributes:
        count: workers that there are to be.
        searches: whether that is measured at all.
        settled: whether `count` is final.
        waited, read: seconds of this measurement in which batches were waited for, and of all workers' reading.
    """

    def __init__(self, count: int, most: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        """Without `most` the number is `count`."""
        self.count, self.most, self._clock = count, most or count, clock
        self.searches = most is not None
        self.settled = not self.searches
        self._enough: int | None = None  # by the measurement before
        self._before: tuple[int, float] | None = None  # a smaller number, and batches a second with that
        self._begin()

    def _begin(self) -> None:
        """A measurement begins once the batches that had been read before are used."""
        self._skip, self._batches, self._seconds = slots(self.count), 0, 0.0
        self.waited = self.read = 0.0
        self._last: float | None = None
        self._counted = 0.0, 0.0

    def pause(self) -> None:
        """Leave out what happens until the next batch, such as an evaluation."""
        self._last = None

    def batch(self) -> int:
        """Count a batch that was used; returns how many workers there are to be."""
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
        self.count, self.settled = count, True

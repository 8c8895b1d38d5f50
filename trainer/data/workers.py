"""Photos through loader workers: a DataLoader that hands out slots of shared memory."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trainer.data.copies import Copies
from trainer.data.folders import unreadable
from trainer.data.photos import DenseReader, Key, PlainReader, Reader, Unreadable
from trainer.data.sampling import Array
from trainer.data.sets import Datasets, PhotoSource, TensorSpec
from trainer.errors import PeerError, RecipeError, SetupError
from trainer.processes import fork_server
from trainer.recipe import Recipe

PREFETCH = 2  # batches each worker reads ahead
POLL = 1.0  # seconds between two looks at whether the workers live
SHARED_MEMORY = "/dev/shm"


def slots(workers: int) -> int:
    """Batches that are being filled or read at once: what DataLoader sends ahead, and the one in use."""
    return workers * PREFETCH + 1 if workers else 1


def check_shared_memory(needed: int, folder: str = SHARED_MEMORY) -> None:
    """Refuse to start what would die of a bus error later.

    Raises:
        SetupError: less than `needed` bytes of shared memory are free.
    """
    if not os.path.isdir(folder):
        return
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    if free < needed:
        raise SetupError(
            f"loader workers need {needed / 2**20:.0f} MiB of shared memory, {folder} has {free / 2**20:.0f} free: "
            f"use fewer data.workers (data.workers=0 needs none), "
            f"or start the container with --shm-size={-(-needed // 2**30)}g or more"
        )


def buffered(datasets: Datasets) -> TensorSpec:
    """A sample's inputs as workers hand them over."""
    size = datasets.image_size
    return datasets.plain or TensorSpec((size, size, datasets.channels), torch.uint8)


class PhotoFeed:
    """Reads batches of one split of photos, in workers or (workers=0) in this process.

    A worker writes into a slot of a buffer that all share, and only the slot's number travels: nothing is allocated in
    a step, what is needed is known before the start, and a stopped worker cannot block this process half-way through
    handing over a tensor.
    """

    def __init__(
        self,
        source: PhotoSource,
        datasets: Datasets,
        rows: int,
        recipe: Recipe,
        workers: int,
        device: torch.device,
    ) -> None:
        self.source, self.rows, self.workers, self.device = source, rows, workers, device
        self.skip, self.patience = recipe.data.on_error == "skip", recipe.timeout
        inputs, targets = buffered(datasets), datasets.targets
        self.images = torch.empty(slots(workers), rows, *inputs.shape, dtype=inputs.dtype)
        self.labels = torch.zeros(slots(workers), rows, *targets.shape, dtype=targets.dtype)
        if workers:
            for buffer in (self.images, self.labels):
                buffer.share_memory_()  # type: ignore[no-untyped-call]
        self.failures: list[Unreadable] = []
        prepare = PlainReader if datasets.plain else DenseReader if len(targets.shape) > 1 else Reader
        self._reader = prepare(source, self.images, self.labels, recipe.augment, recipe.seed, self.skip)
        self._keys: list[Key] = []
        self._loader: Any = None
        self._batches: Any = None
        self._processes: list[BaseProcess] = []
        self._busy = False
        self._copies = Copies(device)

    def training(self, epoch: int, batches: Sequence[Array]) -> Iterator[tuple[Tensor, Tensor]]:
        """A batch for each array of at most `rows` sample indices: images (n, H, W, C) uint8 and labels (n, ...)."""
        for images, labels, _ in self._read([(n % len(self.images), epoch, index) for n, index in enumerate(batches)]):
            yield images, labels

    def evaluation(self, spans: list[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Batches of samples start to stop, in full shape, with the number of rows that count."""
        return self._read([(n % len(self.images), None, np.arange(*span)) for n, span in enumerate(spans)])

    def close(self) -> None:
        """End the workers: they get a moment to finish, a hung one is killed."""
        self._busy = False
        if not self._processes:
            return
        killer = threading.Timer(2 * POLL, _kill, [self._processes])
        killer.daemon = True
        killer.start()
        self._batches = self._loader = None  # DataLoader tells its workers when it goes, and waits for them
        killer.cancel()
        _kill(self._processes)
        self._processes = []

    def _read(self, keys: list[Key]) -> Iterator[tuple[Tensor, Tensor, int]]:
        if self._busy:  # the last epoch was left half-way: its batches are still coming
            self.close()
        if self.workers and keys:
            self._start(keys)
        self._busy = True
        try:
            for n, key in enumerate(keys):
                count, failures, end = self._next(n, key) if self.workers else self._reader.__getitems__(key)
                self._busy = n < len(keys) - 1
                self.failures += failures
                if end:
                    raise unreadable(*failures[0])
                slot, epoch, index = key
                filled = len(index) if epoch is not None else self.rows  # evaluation pads to full shape
                images, labels = self.images[slot, :filled], self.labels[slot, :filled]
                if self.device.type == "cuda":
                    images, labels = self._copies(images), self._copies(labels)
                else:  # the slot is filled again as soon as the next batch is asked for
                    labels = labels.clone()
                yield images, labels, count
        finally:
            if self._busy:
                self.close()

    def _start(self, keys: list[Key]) -> None:
        self._keys[:] = keys
        if self._loader is not None and self._continued(keys[0]):
            return
        self.close()
        others = set(multiprocessing.active_children())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # that so many workers were asked for; what else it warns of fails below
                self._loader = DataLoader(
                    self._reader,  # type: ignore[arg-type]  # a list of samples is all it is asked for
                    batch_sampler=self._keys,  # type: ignore[arg-type]
                    num_workers=self.workers,
                    collate_fn=_as_it_is,
                    timeout=min(POLL, self.patience),
                    worker_init_fn=_begin,
                    multiprocessing_context=fork_server.context("torchvision", "trainer.data.photos"),
                    generator=torch.Generator(),  # else it draws from the global one
                    prefetch_factor=PREFETCH,
                    persistent_workers=True,
                )
                self._batches = iter(self._loader)
        except (TypeError, AttributeError, ImportError, pickle.PicklingError) as error:
            if not getattr(self.source, "by_value", True):  # a lambda, or a class within a function
                self.source.by_value, self._loader = True, None  # type: ignore[attr-defined]
                return self._start(keys)
            raise RecipeError(
                f"the data set cannot be sent to loader workers ({error}); "
                "define its class in a module, or set data.workers=0"
            ) from None
        except OSError as error:
            raise SetupError(f"loader workers cannot be started ({error}); set data.workers=0") from None
        self._processes = [child for child in multiprocessing.active_children() if child not in others]
        self._processes.sort(key=lambda child: child.pid or 0)
        weakref.finalize(self, _kill, self._processes)  # also when this process ends without close()

    def _continued(self, key: Key) -> bool:
        """Begin another epoch with the workers of the last; False when one is too slow to answer."""
        try:
            self._batches = iter(self._loader)
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise PeerError(self._lost(0, key, error)) from None
            return False
        return True

    def _next(self, n: int, key: Key) -> tuple[int, list[Unreadable], bool]:
        """The report of the n-th batch, within `timeout` seconds."""
        deadline = time.monotonic() + self.patience
        while True:
            try:
                report: tuple[int, list[Unreadable], bool] = next(self._batches)
                return report
            except (RuntimeError, OSError, EOFError) as error:
                if "timed out" in str(error) and time.monotonic() < deadline:
                    continue
                raise PeerError(self._lost(n, key, error)) from None

    def _lost(self, n: int, key: Key, error: BaseException) -> str:
        index = key[2]
        awaited = (
            f"{len(index)} samples from {self.source.where(int(index[0]) % len(self.source))} on were awaited"
            if len(index)
            else "nothing was awaited"
        )
        died = re.search(r"\(pid\(s\) ([\d, ]+)\) exited", str(error))
        if any((child.exitcode or 0) > 0 for child in self._processes):  # killed ones have a negative code
            return (
                "loader workers failed to start, their error is above; they import the script that trains: "
                'it needs if __name__ == "__main__": around train(...), or data.workers=0'
            )
        if died:
            what = f"loader worker {died[1]} died (killed, or out of memory)"
        elif "timed out" in str(error):
            pids = [child.pid for child in self._processes]
            what = f"loader worker {pids[n % len(pids)]} did not answer for timeout={self.patience:g} seconds"
        else:
            what = f"a loader worker was lost ({str(error).partition(chr(10))[0]})"
        return f"{what}; {awaited}; data.workers=0 reads in this process"


def _as_it_is(report: Any) -> Any:
    return report


def _begin(_: int) -> None:
    """In a new worker."""
    fork_server.begin_worker()


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()

"""A loader worker: it reads the batches that it is asked for, into buffers in shared memory."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data._utils import worker as torch_worker

from trainer.data.photos.photo_reader import Reader, Report
from trainer.data.sets import Datasets, TensorSpec
from trainer.processes import fork_server
from trainer.processes.resources import PHOTOS, keep_freed_memory

MESSAGE = struct.Struct("4q")  # part, slot, epoch or -1, samples: of one size, so that sending it never blocks


class Buffers(NamedTuple):
    """Slots for batches: inputs (slots, rows, ...), labels (slots, rows, ...), and indices (slots, rows) to read."""

    inputs: Tensor
    labels: Tensor
    order: Tensor

    @classmethod
    def allocate(cls, datasets: Datasets, rows: int, count: int, shared: bool) -> Buffers:
        inputs, targets = buffered(datasets), datasets.targets
        buffers = cls(
            torch.empty(count, rows, *inputs.shape, dtype=inputs.dtype),
            torch.zeros(count, rows, *targets.shape, dtype=targets.dtype),
            torch.zeros(count, rows, dtype=torch.int64),
        )
        for tensor in buffers if shared else ():
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        return buffers


def buffered(datasets: Datasets) -> TensorSpec:
    """A sample's inputs in a buffer."""
    size = datasets.image_size
    return datasets.plain or TensorSpec((size, size, datasets.channels), torch.uint8)


Readers = Callable[[Buffers], Sequence[Reader]]  # makes a reader of each source, which fills these buffers


class Filled(NamedTuple):
    """A batch in a slot, which is the caller's until it asks for the next batch."""

    inputs: Tensor
    labels: Tensor
    report: Report


def serve(connection: Connection, readers: Sequence[Reader], order: Tensor, info: dict[str, Any]) -> None:
    """A worker, until its pipe is closed at the other end."""
    fork_server.begin_worker()
    keep_freed_memory(PHOTOS)
    torch.set_num_threads(1)
    sets: list[Any] = [getattr(reader.source, "items", reader.source) for reader in readers]
    infos = [torch_worker.WorkerInfo(**info, seed=info["id"], dataset=dataset) for dataset in sets]
    while True:
        try:
            part, slot, epoch, count = MESSAGE.unpack(connection.recv_bytes())
            torch_worker._worker_info = infos[part]  # for a user's data set that asks get_worker_info()
            index = order[slot, :count].numpy().copy()
            connection.send(readers[part].fill(slot, None if epoch < 0 else epoch, index))
        except (EOFError, OSError):
            return

"""What a loader worker does: it reads the batches that it is asked for, into buffers which others see."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.utils.data._utils import worker as torchs

from trainer.data.photos.photo_reader import Reader
from trainer.processes import fork_server
from trainer.processes.allocation import PHOTOS, keep_freed_memory

MESSAGE = struct.Struct("4q")  # part, slot, epoch or -1, samples: of one size, so that sending it never blocks


def serve(connection: Connection, readers: Sequence[Reader], order: Tensor, info: dict[str, Any]) -> None:
    """A worker, until its pipe is closed at the other end."""
    fork_server.begin_worker()
    keep_freed_memory(PHOTOS)
    torch.set_num_threads(1)
    sets: list[Any] = [getattr(reader.source, "items", reader.source) for reader in readers]
    told = [torchs.WorkerInfo(**info, seed=info["id"], dataset=one) for one in sets]
    while True:
        try:
            part, slot, epoch, count = MESSAGE.unpack(connection.recv_bytes())
            torchs._worker_info = told[part]  # for a user's data set that asks get_worker_info()
            index = order[slot, :count].numpy().copy()
            begun = time.perf_counter()
            report = readers[part].fill(slot, None if epoch < 0 else epoch, index)
            connection.send(report._replace(seconds=time.perf_counter() - begun))
        except (EOFError, OSError):
            return

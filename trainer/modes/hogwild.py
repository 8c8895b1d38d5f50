"""`hogwild`: workers that update one set of weights in shared memory, without locks.

Recht, Re, Wright and Niu, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent"
(arXiv:1106.5730).
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.errors import SetupError
from trainer.modes.base import Strategy
from trainer.processes.memory_file import Address, MemoryFile, OtherProcessError, aligned
from trainer.saving.tensor_files import StoredTensor

INSTEAD = "use mode=local_sgd, or start all ranks in one container with /proc"


class Hogwild(Strategy):
    """One set of weights and buffers for all ranks; gradients, optimizer and moving average are each rank's own."""

    def connect(self) -> None:
        """Put the weights where all ranks see them.

        Raises:
            SetupError: this system has no anonymous memory files, or does not let one rank open another's.
        """
        super().connect()
        tensors = [*self.module.parameters(), *self.module.buffers()]
        file = zeros(byte_offsets(tensors)[-1]) if self.world.is_main else None
        move(tensors, mapped(self.world.broadcast_object(file and file.address())), fill=self.world.is_main)
        self.world.barrier()
        if file:
            file.close()

    def sync_weights(self, averages: Mapping[str, Tensor]) -> None:
        """Wait until every worker has done its steps; rank 0's moving averages are the truth."""
        self.world.barrier()
        for average in averages.values():
            self.world.broadcast_(average)

    def scatter(self, saved: Mapping[str, StoredTensor], named: Mapping[str, Tensor]) -> None:
        super().scatter(saved, named)
        self.world.barrier()  # no rank trains weights that others still write

    def notes(self) -> dict[str, str]:
        return {
            "workers": "all update one set of weights, no locks: lr acts per worker update, runs are not repeatable"
        }


def zeros(size: int) -> MemoryFile:
    """`size` bytes of memory in rank 0, for all ranks."""
    refusal = f"mode=hogwild shares memory in a way that only Linux has: {INSTEAD}"
    return MemoryFile.create("trainer-hogwild", size, refusal)


def mapped(address: Address) -> mmap.mmap:
    """Rank 0's memory, in this rank's."""
    try:
        return address.open()
    except OtherProcessError:
        raise SetupError(f"mode=hogwild: the ranks do not see each other's processes: {INSTEAD}") from None
    except OSError as error:
        raise SetupError(f"mode=hogwild: rank 0's memory cannot be opened ({error.strerror}): {INSTEAD}") from error


def byte_offsets(tensors: Sequence[Tensor]) -> list[int]:
    """The offset of each tensor in the shared memory, in bytes, and at last the memory's size."""
    offsets = [0]
    for tensor in tensors:
        end = offsets[-1] + extent(tensor) * tensor.element_size()
        offsets.append(aligned(end))
    return offsets


def extent(tensor: Tensor) -> int:
    """Elements from the tensor's first to behind its last, in the layout that it has."""
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 1 + sum(steps) if tensor.numel() else 0


def move(tensors: Sequence[Tensor], memory: mmap.mmap, fill: bool) -> None:
    """Let the tensors be views of `memory`, with their values written to it first where `fill` says so.

    Parameters stay the same objects, and shapes and strides as they were (channels_last).
    """
    for tensor, offset in zip(tensors, byte_offsets(tensors), strict=False):
        if not tensor.numel():
            continue
        flat = torch.frombuffer(memory, dtype=tensor.dtype, count=extent(tensor), offset=offset)
        view = flat.as_strided(tensor.shape, tensor.stride())
        if fill:
            view.copy_(tensor.detach())
        tensor.data = view

"""`hogwild`: workers that update one set of weights in shared memory, without locks.

Recht, Re, Wright and Niu, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient
Descent" (arXiv:1106.5730).
"""

import mmap
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.errors import SetupError
from trainer.modes.base import Strategy
from trainer.processes.memory_file import Address, MemoryFile, OtherProcessError, align
from trainer.saving.tensor_files import StoredTensor

INSTEAD = "use mode=local_sgd, or start all ranks in one container with /proc"


class Hogwild(Strategy):
    """Weights and buffers in memory that all ranks share.

    Each rank has its own gradients, optimizer and moving average.
    """

    def connect(self) -> None:
        """Move the weights into memory that all ranks share.

        Raises:
            SetupError: this system has no anonymous memory files, or one rank cannot open another
                rank's memory.
        """
        super().connect()
        tensors = [*self.module.parameters(), *self.module.buffers()]
        file = None
        if self.world.is_main:
            file = create_memory(compute_byte_offsets(tensors)[-1])
        address = self.world.broadcast_object(file and file.address())
        move(tensors, map_memory(address), fill=self.world.is_main)
        self.world.barrier()
        if file:
            file.close()

    def sync_weights(self, averages: Mapping[str, Tensor]) -> None:
        """Wait for every worker's steps, then copy rank 0's moving averages to the other ranks."""
        self.world.barrier()
        for average in averages.values():
            self.world.broadcast_(average)

    def scatter(
        self,
        saved: Mapping[str, StoredTensor],
        named: Mapping[str, Tensor],
    ) -> None:
        super().scatter(saved, named)
        # A rank must not train weights while another rank is still loading them.
        self.world.barrier()

    def notes(self) -> dict[str, str]:
        return {
            "workers": "all update one set of weights, no locks: lr acts per worker update, runs "
            "are not repeatable"
        }


def create_memory(size: int) -> MemoryFile:
    """Create a memory file of `size` zero bytes on rank 0, which other ranks can map."""
    refusal = f"mode=hogwild shares memory in a way that only Linux supports: {INSTEAD}"
    return MemoryFile.create("trainer-hogwild", size, refusal)


def map_memory(address: Address) -> mmap.mmap:
    """Map rank 0's memory into this process.

    Raises:
        SetupError: this rank cannot see or open the memory.
    """
    try:
        return address.open()
    except OtherProcessError:
        raise SetupError(
            f"mode=hogwild: the ranks do not see each other's processes: {INSTEAD}"
        ) from None
    except OSError as error:
        raise SetupError(
            f"mode=hogwild: rank 0's memory cannot be opened ({error.strerror}): {INSTEAD}"
        ) from error


def compute_byte_offsets(tensors: Sequence[Tensor]) -> list[int]:
    """Return the offset of each tensor in the shared memory, then the total size, both in bytes."""
    offsets = [0]
    for tensor in tensors:
        end = offsets[-1] + count_elements(tensor) * tensor.element_size()
        offsets.append(align(end))
    return offsets


def count_elements(tensor: Tensor) -> int:
    """Count the elements that a tensor spans in memory, including gaps between them."""
    if not tensor.numel():
        return 0
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return last + 1


def move(
    tensors: Sequence[Tensor],
    memory: mmap.mmap,
    fill: bool,
) -> None:
    """Make tensors views of shared memory.

    Parameters remain the same objects and keep their shapes and strides (channels_last).

    Args:
        tensors: tensors of this rank, with the same order and shapes on every rank.
        memory: memory of at least the size that `compute_byte_offsets` returns.
        fill: True to write the tensors' values into the memory first.
    """
    for tensor, offset in zip(tensors, compute_byte_offsets(tensors), strict=False):
        if not tensor.numel():
            continue
        flat = torch.frombuffer(
            memory,
            dtype=tensor.dtype,
            count=count_elements(tensor),
            offset=offset,
        )
        view = flat.as_strided(tensor.shape, tensor.stride())
        if fill:
            view.copy_(tensor.detach())
        tensor.data = view

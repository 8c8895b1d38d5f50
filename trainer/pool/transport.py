"""Transport of values between two processes through slots in shared memory.

A value is anything that pickles. Protocol 5 of pickle (PEP 574) separates a small body from buffers
with the bytes of tensors and arrays. Body and buffers are written to a slot, which both processes
map, and only the position in the slot goes through a pipe.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.processes.memory_file import MemoryFile, align

# Initial size of a slot in bytes.
INITIAL_BYTES = 1 << 16
# Maximum number of elements that torch copies in one thread. Torch would copy more elements in
# several threads, which would compete with the workers for cores. `_Rows.write` therefore stacks at
# most this number of elements at a time, and copies larger rows without torch.
MAX_ELEMENTS = 1 << 15


def new_slot() -> MemoryFile:
    """Create shared memory for the tasks and answers of a worker, or for its definition.

    Each process writes to a slot only while the other process waits for a message about it.

    Raises:
        SetupError: the operating system does not support this kind of shared memory.
    """
    return MemoryFile.create(
        "trainer-pool",
        INITIAL_BYTES,
        "a DevicePool needs a kind of shared memory that only Linux has",
    )


class Extent(NamedTuple):
    """Position of a value in a slot.

    Attributes:
        start: offset of the first byte.
        end: offset after the last byte.
        body: size of the body in bytes.
        buffers: number of buffers.
        rows: number of tensors or arrays of equal shape in the only buffer, if the value was
            pickled as one block of rows; otherwise 0.
    """

    start: int = 0
    end: int = 0
    body: int = 0
    buffers: int = 0
    rows: int = 0


class Message(NamedTuple):
    """A message through a worker's pipe: a task for the worker, or the worker's answer to it.

    Attributes:
        extent: position in the slot of the task's items, or of the answer's results.
        kind: value of `worker.Kind`.
        slot: index of the slot.
        failures: number of failures among the results of an answer; 0 in a task.
        seconds: time in seconds that the worker needed for an answer; 0 in a task.
    """

    extent: Extent
    kind: int
    slot: int
    failures: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class Packed:
    """A pickled value with its buffers.

    Attributes:
        body: the pickle without the buffers.
        buffers: bytes of the tensors and arrays.
        rows: number of tensors or arrays, if the value is a list of these with equal shapes and the
            body contains only their type and shape; 0 for all other values.
    """

    body: bytes
    buffers: Sequence[Any]
    rows: int = 0

    def open(self) -> Any:
        """Unpickle the value."""
        if not self.rows:
            return pickle.loads(self.body, buffers=self.buffers)
        dtype, shape = pickle.loads(self.body)

        def view_rows(buffer: Any, count: int) -> Any:
            if isinstance(dtype, torch.dtype):
                return _view_tensor(buffer, dtype, (count, *shape))
            return np.frombuffer(buffer, dtype).reshape(count, *shape)

        if len(self.buffers) == self.rows:
            return [view_rows(buffer, 1)[0] for buffer in self.buffers]
        return list(view_rows(self.buffers[0], self.rows))


def pack(value: Any) -> Packed:
    """Pickle a value.

    Tensors lose their gradients. After unpickling they are contiguous and on the CPU, except
    subclasses of Tensor and other tensors that torch itself pickles.

    Raises:
        TypeError: the value contains a sparse tensor.
        Exception: the value cannot be pickled; pickle can raise any exception.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    for device in pickler.devices:
        torch.cuda.current_stream(device).synchronize()
    return Packed(file.getvalue(), [buffer.raw() for buffer in pickler.buffers])


def pack_rows(values: Any) -> Packed:
    """Pickle a sequence of rows, which unpickles as a list.

    Rows that are all tensors, or all arrays, of the same shape and type are written as one
    contiguous block.

    Args:
        values: a list, tuple, tensor or array.
    """
    rows = _Rows.of(values)
    if rows is None:
        return pack(list(values))
    return Packed(pickle.dumps((rows.dtype, rows.shape)), [rows], rows.count)


def store(packed: Packed, slot: MemoryFile, start: int = 0) -> Extent:
    """Write a value to a slot: first the sizes of its buffers, then its body, then its buffers.

    Args:
        packed: the value.
        slot: the slot, which grows if necessary.
        start: offset of the first byte.

    Returns:
        The position that `fetch` needs to read the value.
    """
    sizes = [buffer.nbytes for buffer in packed.buffers]
    begin = start + 8 * len(sizes)
    offsets = []
    end = begin + len(packed.body)
    for size in sizes:
        offsets.append(align(end))
        end = offsets[-1] + size
    memory = slot.reach(end)
    struct.pack_into(f"{len(sizes)}q", memory, start, *sizes)
    memory[begin : begin + len(packed.body)] = packed.body
    for offset, size, buffer in zip(offsets, sizes, packed.buffers, strict=True):
        if isinstance(buffer, _Rows):
            buffer.write(memory, offset)
        elif size:
            memory[offset : offset + size] = buffer
    return Extent(start, end, len(packed.body), len(sizes), packed.rows)


def fetch(memory: mmap.mmap, extent: Extent, copy: bool) -> Packed:
    """Read a value that `store` wrote.

    Args:
        memory: the mapped slot.
        extent: position of the value.
        copy: whether tensors and arrays own their memory; if False, they are views of the slot.
    """
    view = memoryview(memory)
    sizes = struct.unpack_from(f"{extent.buffers}q", memory, extent.start)
    end = extent.start + 8 * extent.buffers + extent.body
    body = memory[end - extent.body : end]
    buffers: list[Any] = []
    for size in sizes:
        offset = align(end)
        end = offset + size
        if copy and extent.rows:
            # Copy each row separately, so that a result that the caller keeps does not keep the
            # memory of the whole batch.
            row = size // extent.rows
            buffers = [bytearray(view[at : at + row]) for at in range(offset, end, row)]
        elif copy:
            buffers.append(bytearray(view[offset:end]))
        else:
            buffers.append(view[offset:end])
    return Packed(body, buffers, extent.rows)


class _Pickler(pickle.Pickler):
    """Pickler that puts the bytes of tensors and arrays into buffers."""

    def __init__(self, file: io.BytesIO) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        self.devices: set[torch.device] = set()
        super().__init__(file, protocol=5, buffer_callback=self.buffers.append)

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        if value.layout not in (torch.strided, torch.jagged):
            raise TypeError(
                f"a tensor of layout {value.layout} does not travel between processes: send its "
                ".to_dense()"
            )
        if not _is_plain(value):
            return NotImplemented
        if value.device.type == "cuda":
            self.devices.add(value.device)
        buffer = pickle.PickleBuffer(_view_bytes(_copy_to_host(value)).data)
        return _view_tensor, (buffer, value.dtype, tuple(value.shape))


class _Rows:
    """Tensors or arrays of one shape and type, which are written as one block."""

    def __init__(
        self,
        values: Any,
        dtype: torch.dtype | np.dtype[Any],
        shape: tuple[int, ...],
        element_size: int,
    ) -> None:
        """Prepare to write `values`; `shape` is the shape of one row."""
        self.values = values
        self.dtype = dtype
        self.shape = shape
        self.count = len(values)
        self.nbytes = self.count * math.prod(shape) * element_size

    @classmethod
    def of(cls, values: Any) -> _Rows | None:
        """Prepare to write `values` as one block.

        Returns None if the values differ in shape or type, have no bytes, or consist of more than
        their bytes, such as arrays of Python objects.
        """
        first = values[0] if len(values) else None
        if isinstance(first, Tensor):
            is_stacked = isinstance(values, Tensor)
            if not _is_plain(first) or not (is_stacked or _are_alike(values, first)):
                return None
            if first.device.type != "cpu":
                values = _copy_to_host(values if is_stacked else torch.stack(list(values)))
                if first.device.type == "cuda":
                    torch.cuda.current_stream(first.device).synchronize()
            rows = cls(values, first.dtype, tuple(first.shape), first.element_size())
        elif type(first) is np.ndarray and first.ndim and not first.dtype.hasobject:
            dtype = first.dtype
            if not all(
                type(row) is np.ndarray and row.shape == first.shape and row.dtype == dtype
                for row in values
            ):
                return None
            rows = cls(values, dtype, first.shape, first.itemsize)
        else:
            return None
        return rows if rows.nbytes else None

    def write(self, memory: mmap.mmap, offset: int) -> None:
        """Write all rows to `memory` at `offset`."""
        elements = math.prod(self.shape)
        if isinstance(self.values, Tensor):
            memory[offset : offset + self.nbytes] = _view_bytes(self.values).data
        elif isinstance(self.dtype, torch.dtype) and elements < MAX_ELEMENTS:
            count = self.count * elements
            flat = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=offset)
            rows = flat.view(self.count, *self.shape)
            step = MAX_ELEMENTS // elements
            with torch.no_grad():
                for at in range(0, self.count, step):
                    torch.stack(list(self.values[at : at + step]), out=rows[at : at + step])
        else:
            size = self.nbytes // self.count
            starts = range(offset, offset + self.nbytes, size)
            for start, value in zip(starts, self.values, strict=True):
                memory[start : start + size] = _view_bytes(value).data


def _is_plain(tensor: Tensor) -> bool:
    """Return whether bytes, shape and type describe the tensor completely.

    All other tensors are pickled by torch.
    """
    is_strided = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_strided and not tensor.is_quantized and not tensor.is_meta


def _are_alike(rows: Sequence[Any], first: Tensor) -> bool:
    """Return whether `first` is contiguous and all rows have its shape, type and device."""
    kind = first.shape, first.dtype, first.device
    return first.is_contiguous() and all(
        type(row) is Tensor
        and row.layout is torch.strided
        and (row.shape, row.dtype, row.device) == kind
        for row in rows
    )


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU.

    A copy from a GPU goes to pinned memory and is contiguous. The copy is asynchronous: its values
    are complete once the current stream of the GPU is synchronized.
    """
    if tensor.device.type != "cuda":
        return tensor.detach().cpu()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor.detach(), non_blocking=True)


def _view_bytes(value: Tensor | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the bytes of a tensor or array as a flat array, without a copy if it is contiguous."""
    if not isinstance(value, Tensor):
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if not flat.numel():
        return np.empty(0, np.uint8)
    return flat.view(torch.uint8).numpy()


def _view_tensor(buffer: Any, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return a tensor that is a view of the bytes in `buffer`."""
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(buffer, dtype=dtype).view(shape)

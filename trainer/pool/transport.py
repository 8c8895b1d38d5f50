"""Values in shared memory: tensors, arrays, and whatever pickles, in slots that two processes map.

pickle's protocol 5 (PEP 574) makes a small body of a value, and puts the bytes of its tensors and arrays beside it.
Only their offsets in the slot go through the pipe, so no bytes are copied through it.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.processes.memory_file import MemoryFile, aligned

SMALLEST = 1 << 16  # bytes of a slot at first
LITTLE = 1 << 15  # elements that torch copies in one thread; for more it uses several, which the workers need


def new_slot() -> MemoryFile:
    """Memory for a worker's tasks and answers. Either side writes only while the other waits for its message. Raises
    SetupError where this system does not have it."""
    return MemoryFile.create("trainer-pool", SMALLEST, "a DevicePool shares memory in a way that only Linux has")


class Extent(NamedTuple):
    """Where a value is in a slot."""

    start: int = 0
    end: int = 0
    body: int = 0  # bytes
    buffers: int = 0
    rows: int = 0  # not 0: the one buffer holds so many results of the same shape


class Message(NamedTuple):
    """All that goes through a worker's pipe."""

    extent: Extent
    kind: int
    slot: int
    failures: int = 0
    seconds: float = 0.0


class Packed:
    """A pickled value with its buffers; `open` unpickles it."""

    def __init__(self, body: bytes, buffers: Sequence[Any], rows: int = 0) -> None:
        self.body, self.buffers, self.rows = body, buffers, rows

    def open(self) -> Any:
        if not self.rows:
            return pickle.loads(self.body, buffers=self.buffers)
        kind, shape = pickle.loads(self.body)

        def rows(buffer: Any, count: int) -> Any:
            if isinstance(kind, torch.dtype):
                return _tensor(buffer, kind, (count, *shape))
            return np.frombuffer(buffer, kind).reshape(count, *shape)

        if len(self.buffers) == self.rows:
            return [rows(buffer, 1)[0] for buffer in self.buffers]
        return list(rows(self.buffers[0], self.rows))


def pack(value: Any) -> Packed:
    """Pickle a value. Tensors lose their gradient and unpickle on the CPU, contiguous.

    Raises:
        TypeError: a sparse tensor.
        Exception: whatever pickle raises where something cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    for device in pickler.devices:
        torch.cuda.current_stream(device).synchronize()
    return Packed(file.getvalue(), [buffer.raw() for buffer in pickler.buffers])


def pack_rows(values: Any) -> Packed:
    """Pickle a list, tuple, tensor or array of rows, which unpickles as a list.

    Where all are tensors, or arrays, of one shape, they go as one block, from which they unpickle contiguous.
    """
    rows = _Rows.of(values)
    if rows is None:
        return pack(list(values))
    return Packed(pickle.dumps((rows.kind, rows.shape)), [rows], rows.count)


def store(packed: Packed, slot: MemoryFile, start: int = 0) -> Extent:
    """Write it at `start`: the sizes of its buffers, its body, its buffers."""
    sizes = [buffer.nbytes for buffer in packed.buffers]
    begin = start + 8 * len(sizes)
    offsets, end = [], begin + len(packed.body)
    for size in sizes:
        offsets.append(aligned(end))
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
    """Read what `store` wrote. With `copy` tensors and arrays own their memory; else they are views of the slot."""
    view = memoryview(memory)
    sizes = struct.unpack_from(f"{extent.buffers}q", memory, extent.start)
    end = extent.start + 8 * extent.buffers + extent.body
    body = memory[end - extent.body : end]
    buffers: list[Any] = []
    for size in sizes:
        offset = aligned(end)
        end = offset + size
        if copy and extent.rows:
            row = size // extent.rows
            buffers = [bytearray(view[at : at + row]) for at in range(offset, end, row)]
        else:
            buffers.append(bytearray(view[offset:end]) if copy else view[offset:end])
    return Packed(body, buffers, extent.rows)


class _Pickler(pickle.Pickler):
    """Keeps the bytes of tensors and arrays out of the body."""

    def __init__(self, file: io.BytesIO) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        self.devices: set[torch.device] = set()
        super().__init__(file, protocol=5, buffer_callback=self.buffers.append)

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        if value.layout not in (torch.strided, torch.jagged):
            raise TypeError(
                f"a tensor of layout {value.layout} does not travel between processes: send its .to_dense()"
            )
        if not _plain(value):
            return NotImplemented
        if value.device.type == "cuda":
            self.devices.add(value.device)
        return _tensor, (pickle.PickleBuffer(_bytes(_on_host(value)).data), value.dtype, tuple(value.shape))


class _Rows:
    """N tensors or arrays of one shape and type, to be written as one block."""

    def __init__(self, values: Any, kind: torch.dtype | np.dtype[Any], shape: tuple[int, ...], size: int) -> None:
        self.values, self.kind, self.shape, self.count = values, kind, shape, len(values)
        self.nbytes = self.count * math.prod(shape) * size

    @classmethod
    def of(cls, values: Any) -> _Rows | None:
        """None where they are not of one shape and type, or have no bytes."""
        first = values[0] if len(values) else None
        if isinstance(first, Tensor):
            if not _plain(first) or not (isinstance(values, Tensor) or _alike(values, first)):
                return None
            if first.device.type != "cpu":
                values = _on_host(values if isinstance(values, Tensor) else torch.stack(list(values)))
                if first.device.type == "cuda":
                    torch.cuda.current_stream(first.device).synchronize()
            rows = cls(values, first.dtype, tuple(first.shape), first.element_size())
        elif type(first) is np.ndarray and first.ndim and not first.dtype.hasobject:
            kind = first.dtype
            if not all(type(row) is np.ndarray and row.shape == first.shape and row.dtype == kind for row in values):
                return None
            rows = cls(values, kind, first.shape, first.itemsize)
        else:
            return None
        return rows if rows.nbytes else None

    def write(self, memory: mmap.mmap, offset: int) -> None:
        row = math.prod(self.shape)
        if isinstance(self.values, Tensor):
            memory[offset : offset + self.nbytes] = _bytes(self.values).data
        elif isinstance(self.kind, torch.dtype) and row < LITTLE:
            flat = torch.frombuffer(memory, dtype=self.kind, count=self.count * row, offset=offset)
            whole, step = flat.view(self.count, *self.shape), LITTLE // row
            with torch.no_grad():
                for at in range(0, self.count, step):
                    torch.stack(list(self.values[at : at + step]), out=whole[at : at + step])
        else:
            size = self.nbytes // self.count
            for at, value in zip(range(offset, offset + self.nbytes, size), self.values, strict=True):
                memory[at : at + size] = _bytes(value).data


def _plain(tensor: Tensor) -> bool:
    """Whether bytes, shape and type are all of it; torch pickles the others."""
    strided = type(tensor) is Tensor and tensor.layout is torch.strided
    return strided and not tensor.is_quantized and not tensor.is_meta


def _alike(rows: Sequence[Any], first: Tensor) -> bool:
    kind = first.shape, first.dtype, first.device
    plain = (row for row in rows if type(row) is Tensor and row.layout is torch.strided)
    return first.is_contiguous() and sum((row.shape, row.dtype, row.device) == kind for row in plain) == len(rows)


def _on_host(tensor: Tensor) -> Tensor:
    """On the CPU; from a GPU through pinned memory, contiguous, complete once its stream is synchronised."""
    if tensor.device.type != "cuda":
        return tensor.detach().cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach(), non_blocking=True)


def _bytes(value: Tensor | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Its bytes as a flat array, without a copy where it is contiguous."""
    if isinstance(value, Tensor):
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        array: np.ndarray[Any, Any] = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
        return array
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _tensor(buffer: Any, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor as a view of its bytes."""
    if not math.prod(shape):
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).view(tuple(shape))

"""Serialize tensors to safetensors files, write them durably, and map them into memory.

The format is described at huggingface.co/docs/safetensors, section "Format".
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import NonNegativeInt, TypeAdapter, ValidationError
from safetensors import safe_open
from torch import Tensor

from trainer.errors import NotFiniteError
from trainer.processes import faults

# Maximum number of bytes per call of `os.write`.
CHUNK = 16 * 2**20

# Names of the types in a safetensors file. The library sorts tensors in this order: wide types come
# first, which keeps all tensors aligned.
DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

# Type of the metadata entry "slices": for each shard, its first row in the complete tensor, and the
# shape of the complete tensor.
_SLICES = TypeAdapter(dict[str, tuple[NonNegativeInt, list[NonNegativeInt]]])


class Shard(NamedTuple):
    """Shard of a tensor along dimension 0, or a complete tensor.

    Attributes:
        local: the rows of this rank, (rows, ...).
        shape: shape of the complete tensor.
        start: index of the first row of `local` in the complete tensor.
    """

    local: Tensor
    shape: torch.Size
    start: int = 0

    @property
    def is_whole(self) -> bool:
        return self.local.shape == self.shape

    def rows_of(self, whole: StoredTensor) -> Tensor:
        """Read only those rows of `whole` that this shard covers.

        Args:
            whole: tensor of the same shape as the complete tensor of this shard.
        """
        if self.is_whole:
            return whole.read()
        return whole.narrow(self.start, len(self.local))


def wrap_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """Return complete tensors as shards."""
    return {name: Shard(tensor, tensor.shape) for name, tensor in tensors.items()}


class StoredTensor:
    """Tensor that consists of one or several shards, which are joined only when it is read.

    The shards are in memory, or are views of memory-mapped files.
    """

    def __init__(self, pieces: Iterable[Shard]) -> None:
        """Sort the shards by their first row, and check that they form the tensor.

        Args:
            pieces: shards that together contain each row of the tensor exactly once, in any order.

        Raises:
            ValueError: a row is missing or repeated, or shapes or types differ.
        """
        self.pieces = sorted(pieces, key=lambda piece: piece.start)
        first = self.pieces[0]
        self.shape = first.shape
        self.dtype = first.local.dtype
        if first.is_whole and len(self.pieces) == 1:
            return
        end = 0
        for piece in self.pieces:
            local = piece.local
            is_alike = piece.shape == self.shape and local.dtype == self.dtype
            follows = self.shape and piece.start == end
            if not is_alike or not follows or local.shape[1:] != self.shape[1:]:
                raise ValueError(f"row {end} of {tuple(self.shape)} is not there once")
            end += len(local)
        if end != self.shape[0]:
            raise ValueError(f"row {end} of {tuple(self.shape)} is not there")

    def read(self) -> Tensor:
        """Return the complete tensor. The result is a view if one file contains all rows."""
        if self.pieces[0].is_whole:
            return self.pieces[0].local
        return torch.cat([piece.local for piece in self.pieces])

    def narrow(self, start: int, length: int) -> Tensor:
        """Return `length` rows from row `start` on, (length, ...).

        The result is a view if one file contains all of these rows.
        """
        parts = []
        for piece in self.pieces:
            first = max(start - piece.start, 0)
            last = min(start + length - piece.start, len(piece.local))
            parts.append(piece.local[first : max(first, last)])
        # An empty selection still needs the shape and the type of the rows.
        parts = [part for part in parts if len(part)] or parts[:1]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def serialize(
    tensors: Mapping[str, Tensor] | Mapping[str, StoredTensor],
    metadata: Mapping[str, str] | None = None,
) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file: the header, then one tensor at a time.

    Equal arguments result in equal bytes. They are the bytes that the safetensors library writes,
    except that the library does not sort the metadata.

    Args:
        tensors: tensors by name.
        metadata: further entries of the header, strings by name.

    Raises:
        TypeError: safetensors files cannot contain the type of a tensor.
    """
    type_order = {dtype: index for index, dtype in enumerate(DTYPES)}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} is {tensor.dtype}, which a safetensors file cannot hold")
    names = sorted(tensors, key=lambda name: (type_order[tensors[name].dtype], name))
    entries: dict[str, Any] = {}
    if metadata:
        entries["__metadata__"] = dict(sorted(metadata.items()))
    end = 0
    for name in names:
        shape = tensors[name].shape
        dtype = tensors[name].dtype
        start = end
        end = start + shape.numel() * dtype.itemsize
        entries[name] = {
            "dtype": DTYPES[dtype],
            "shape": shape,
            "data_offsets": [start, end],
        }
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    # The data must start at a multiple of 8 bytes, so that all tensors are aligned.
    header += b" " * (-len(header) % 8)
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for name in names:
        tensor = tensors[name]
        if isinstance(tensor, StoredTensor):
            tensor = tensor.read()
        yield view_bytes(tensor)


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    array: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def serialize_shards(pieces: Mapping[str, Shard]) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file that contains shards.

    The metadata entry "slices" maps the name of each shard that is not a complete tensor to its
    first row and the shape of the complete tensor.
    """
    slices = {
        name: (piece.start, piece.shape) for name, piece in pieces.items() if not piece.is_whole
    }
    metadata = {}
    if slices:
        metadata["slices"] = json.dumps(slices, sort_keys=True)
    return serialize({name: piece.local for name, piece in pieces.items()}, metadata)


def map_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Map a safetensors file into memory.

    The operating system reads a page when it is accessed. Writes to the tensors are private to this
    process, and the tensors stay valid after the file is removed.

    Args:
        path: path of the file.

    Returns:
        (tensors, metadata): the tensors by name, as views of the file, and the metadata of the
        file.

    Raises:
        ValueError: the file is not a safetensors file. The message is one line.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except (MemoryError, OSError):
        raise
    # The library raises many types of exceptions for damaged files.
    except Exception as error:
        raise ValueError(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from None


def map_shards(path: str | Path) -> dict[str, Shard]:
    """Map a file from `serialize_shards` into memory.

    Returns:
        The shards by name.

    Raises:
        ValueError: the file is not a safetensors file, or its metadata contradicts its tensors.
    """
    tensors, metadata = map_tensors(path)
    try:
        slices = _SLICES.validate_json(metadata.get("slices", "{}"))
    except ValidationError:
        raise ValueError("its slices make no sense") from None
    pieces = wrap_tensors(tensors)
    for name, (start, shape) in slices.items():
        local = tensors.get(name, torch.tensor(0))
        has_rows = shape and local.dim() > 0
        is_inside = has_rows and start + len(local) <= shape[0]
        if not is_inside or [*local.shape[1:]] != shape[1:]:
            raise ValueError(f"its slice of {name} is none of a tensor there")
        pieces[name] = Shard(local, torch.Size(shape), start)
    return pieces


def require_finite(where: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise an error if a tensor contains NaN or infinity.

    Args:
        where: name of the file or the part, for the message.
        tensors: tensors by name.

    Raises:
        NotFiniteError: a value is not finite.
    """
    for name, tensor in tensors.items():
        # The sum is 100 times faster than the exact test and is not finite if any value is not.
        # Large finite values may overflow it, so only the exact test can refuse the tensor.
        if not tensor.is_floating_point() or tensor.sum().isfinite():
            continue
        if not tensor.isfinite().all():
            advice = (
                "nothing was overwritten; lower optimizer.lr or set clip_grad_norm=1, then "
                "resume=auto"
            )
            raise NotFiniteError(f"{name} ({where}) is not finite: {advice}")


def write_synced(path: Path, parts: Iterable[memoryview], place: str) -> tuple[int, str]:
    """Write a file and sync it to the disk.

    Args:
        path: path of the file.
        parts: contents of the file, in the order in which they are written.
        place: name of the writer in `TRAINER_FAULT`, with which tests inject faults.

    Returns:
        (size, sha256): the size in bytes and the SHA-256 (hexadecimal). Both are computed from
        `parts` in memory, and not from the file on the disk.
    """
    sha = hashlib.sha256()
    size = 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for part in parts:
            sha.update(part)
            size += len(part)
            while part:
                written = os.write(file, part[:CHUNK])
                part = part[written:]
            fault_point("write", place)
        fault_point("fsync", place)
        os.fsync(file)
    finally:
        os.close(file)
    return size, sha.hexdigest()


def sync(path: Path) -> None:
    """Sync a file, or the entries of a directory, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def fault_point(point: str, place: str = "save") -> None:
    """Simulate a fault at this point of a write if `TRAINER_FAULT` requests it, for tests."""
    if faults.is_active:
        faults.trigger(place, point)

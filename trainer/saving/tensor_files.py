"""Tensors as files: the bytes of a safetensors file, how they reach the disk, how they are read.

The format: huggingface.co/docs/safetensors, "Format".
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

CHUNK = 16 * 2**20  # bytes for each write to disk


# As safetensors names them, in the order in which it lays tensors out: the widest first.
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


_SLICES = TypeAdapter(dict[str, tuple[NonNegativeInt, list[NonNegativeInt]]])


class Piece(NamedTuple):
    """A part of one of the whole model's tensors, or all of it."""

    local: Tensor  # this rank's rows of it
    shape: torch.Size  # of the whole
    start: int = 0  # the first of the rows

    @property
    def is_whole(self) -> bool:
        return self.local.shape == self.shape

    def rows_of(self, whole: StoredTensor) -> Tensor:
        """The same part of a tensor of that shape; nothing else of it is read."""
        return whole.read() if self.is_whole else whole.narrow(self.start, len(self.local))


class StoredTensor:
    """A tensor whose rows lie in one file or several, read when they are asked for."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        """Raises ValueError where the pieces are not all rows of one tensor, each once."""
        self.pieces = sorted(pieces, key=lambda piece: piece.start)
        self.shape, self.dtype = self.pieces[0].shape, self.pieces[0].local.dtype
        if [piece.is_whole for piece in self.pieces] == [True]:
            return
        end = 0
        for piece in self.pieces:
            alike = piece.shape == self.shape and piece.local.dtype == self.dtype
            if not self.shape or not alike or piece.start != end or piece.local.shape[1:] != self.shape[1:]:
                raise ValueError(f"row {end} of {tuple(self.shape)} is not there once")
            end += len(piece.local)
        if end != self.shape[0]:
            raise ValueError(f"row {end} of {tuple(self.shape)} is not there")

    def read(self) -> Tensor:
        """All of it: a view where it lies in one file, else put together."""
        return self.pieces[0].local if self.pieces[0].is_whole else torch.cat([piece.local for piece in self.pieces])

    def narrow(self, start: int, length: int) -> Tensor:
        """Rows from `start` on, (length, ...)."""
        rows = []
        for piece in self.pieces:
            first, last = max(start - piece.start, 0), min(start + length - piece.start, len(piece.local))
            rows.append(piece.local[first : max(first, last)])
        rows = [part for part in rows if len(part)] or rows[:1]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


def whole(tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Tensors that lie in one place each."""
    return {name: StoredTensor([Piece(tensor, tensor.shape)]) for name, tensor in tensors.items()}


def serialised(
    tensors: Mapping[str, Tensor] | Mapping[str, StoredTensor], metadata: Mapping[str, str] | None = None
) -> Iterator[memoryview]:
    """A safetensors file in pieces: its header, then tensor by tensor. Equal input gives equal bytes, which are the
    library's own but for the metadata, which that orders at random.

    Raises:
        TypeError: a tensor has a type that such files cannot hold.
    """
    ranks = {dtype: rank for rank, dtype in enumerate(DTYPES)}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} is {tensor.dtype}, which a safetensors file cannot hold")
    names = sorted(tensors, key=lambda name: (ranks[tensors[name].dtype], name))
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].shape.numel() * tensors[name].dtype.itemsize
        shape = list(tensors[name].shape)
        entries[name] = {"dtype": DTYPES[tensors[name].dtype], "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for name in names:
        tensor = tensors[name]
        yield _bytes_of(tensor.read() if isinstance(tensor, StoredTensor) else tensor)


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    array: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def serialised_pieces(pieces: Mapping[str, Piece]) -> Iterator[memoryview]:
    """As `serialised`; of what is cut, "slices" in the metadata has by name the first row, and the whole's shape."""
    slices = {name: (piece.start, piece.shape) for name, piece in pieces.items() if not piece.is_whole}
    metadata = {"slices": json.dumps(slices, sort_keys=True)} if slices else {}
    return serialised({name: piece.local for name, piece in pieces.items()}, metadata)


def mapped(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, as views of it: the system reads the pages that are looked at, when they are.

    What is written to them stays in this process, and they outlive the file's name. Raises ValueError, of one line, for
    anything else than a safetensors file.
    """
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (MemoryError, OSError):
        raise
    except Exception as error:  # as many kinds as there are ways to be wrong
        raise ValueError(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from None


def mapped_pieces(path: str | Path) -> dict[str, Piece]:
    """As `mapped`, of what `serialised_pieces` made."""
    tensors = mapped(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    try:
        slices = _SLICES.validate_json(metadata.get("slices", "{}"))
    except ValidationError:
        raise ValueError("its slices make no sense") from None
    pieces = {name: Piece(tensor, tensor.shape) for name, tensor in tensors.items()}
    for name, (start, shape) in slices.items():
        local = tensors.get(name, torch.tensor(0))
        if not shape or not local.dim() or start + len(local) > shape[0] or [*local.shape[1:]] != shape[1:]:
            raise ValueError(f"its slice of {name} is none of a tensor there")
        pieces[name] = Piece(local, torch.Size(shape), start)
    return pieces


def require_finite(where: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises NotFiniteError where a value is NaN or infinite; `where` names the file or part."""
    for name, tensor in tensors.items():
        # A sum is 100 times cheaper than the exact test and finite only if all of it is; it may overflow, so ask again.
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all():
            advice = "nothing was overwritten; lower optimizer.lr or set clip_grad_norm=1, then resume=auto"
            raise NotFiniteError(f"{name} ({where}) is not finite: {advice}")


def write_synced(path: Path, parts: Iterable[memoryview], place: str) -> tuple[int, str]:
    """Write and sync one file. Returns how many bytes it holds and their SHA-256 in hexadecimal, by those in memory."""
    sha, size = hashlib.sha256(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        for part in parts:
            sha.update(part)
            size += len(part)
            while part:
                part = part[os.write(file, part[:CHUNK]) :]
            fault_point("write", place)
        fault_point("fsync", place)
        os.fsync(file)
    finally:
        os.close(file)
    return size, sha.hexdigest()


def sync(path: Path) -> None:
    """What a file holds, or the names in a folder, is on the disk."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def fault_point(point: str, place: str = "save") -> None:
    """Where a test lets saving fail."""
    if faults.active:
        faults.fault(place, point)

"""Tensors as files: the bytes of a safetensors file, how they reach the disk, how they are read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict

import safetensors.torch
from safetensors import safe_open
from torch import Tensor

from trainer.errors import NotFiniteError
from trainer.processes import faults

CHUNK = 16 * 2**20  # bytes for each write to disk


class Written(TypedDict):
    """What a file holds: bytes, and their SHA-256 in hexadecimal."""

    size: int
    sha256: str


def serialised(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> list[memoryview]:
    """A safetensors file as header and data. Equal input gives equal bytes: the library orders metadata at random."""
    plain: dict[str, Tensor] = {}
    storages = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if place in storages else tensor
        storages.add(place)
    data = safetensors.torch.save(plain)
    entries = json.loads(_header(data))
    if metadata:
        entries = {"__metadata__": dict(sorted(metadata.items())), **entries}
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    rest = memoryview(data)[8 + len(_header(data)) :]
    return [memoryview(len(header).to_bytes(8, "little") + header), rest]


def _header(data: bytes) -> bytes:
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def parsed(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises ValueError, of one line, for anything else."""
    try:
        return safetensors.torch.load(data)
    except MemoryError:
        raise
    except Exception as error:  # as many kinds as there are ways to be wrong
        raise ValueError(_line(error)) from None


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
    except Exception as error:
        raise ValueError(_line(error)) from None


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def require_finite(where: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises NotFiniteError where a value is NaN or infinite; `where` names the file or part."""
    for name, tensor in tensors.items():
        # A sum is 100 times cheaper than the exact test and finite only if all of it is; it may overflow, so ask again.
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all():
            advice = "nothing was saved over; lower optimizer.lr or set clip_grad_norm=1, then resume=auto"
            raise NotFiniteError(f"{name} ({where}) is not finite: {advice}")


def write_synced(path: Path, parts: Iterable[memoryview], place: str) -> Written:
    """Write and sync one file. Returns what it holds, by the bytes in memory."""
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
    return {"size": size, "sha256": sha.hexdigest()}


def sync_folder(folder: Path) -> None:
    """The names in the folder are on the disk."""
    sync(folder, os.O_DIRECTORY)


def sync(path: Path, flags: int = 0) -> None:
    """What a file holds is on the disk."""
    file = os.open(path, os.O_RDONLY | flags | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def fault_point(point: str, place: str = "save") -> None:
    """Where a test lets saving fail."""
    if faults.active:
        faults.fault(place, point)

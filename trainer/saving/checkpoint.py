"""Checkpoints of a run folder: commit, verify, discover, prune; and the weight files meant for users.

A checkpoint is a folder `checkpoints/step-00001234/` of safetensors files and a `manifest.json` that holds their sizes
and SHA-256 and a seal of its own. It is written beside its final name, synced, read back and only then renamed, so a
folder with a checkpoint's name is whole, whenever the writer was killed. What rots later is found by the hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import CheckpointError, NotFiniteError, SetupError
from trainer.processes import faults
from trainer.saving.files import opened, put, remove, writing

MANIFEST = "manifest.json"
MAX_MANIFEST = 64 * 2**20  # bytes; a run's history is far smaller
CHUNK = 16 * 2**20  # bytes for each write to disk
_NAME = re.compile(r"step-([0-9]{8,})")
_LEFTOVER = re.compile(r"step-[0-9]{8,}\.tmp-.+")
_STEM = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"  # no slash and no leading dot: a name can never leave its folder
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n\}\n\Z')


class Position(NamedTuple):
    """Where a run stands. With `step_in_epoch` equal to the steps of an epoch, only its evaluation is still to do."""

    step: int  # optimizer steps done in all
    epoch: int  # the epoch being trained, from 0
    step_in_epoch: int  # steps of it that are done


@dataclass(frozen=True)
class State:
    """All that a run needs to go on."""

    position: Position
    tensors: dict[str, dict[str, Tensor]]  # "model", "optimizer", "ema", "ranks", ... -> tensors by plain name
    facts: dict[str, Any]  # JSON: history, run_id, topology {mode, world_size}


_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _File(BaseModel):
    model_config = ConfigDict(strict=True)

    size: _Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Manifest(BaseModel):
    model_config = ConfigDict(strict=True)

    format: Annotated[int, Field(ge=1, le=1)]
    step: _Count
    epoch: _Count
    step_in_epoch: _Count
    files: dict[Annotated[str, Field(pattern=rf"^{_STEM}\.safetensors$")], _File]
    facts: dict[str, Any]


def commit(folder: Path, state: State, keep: int) -> Path:
    """Save `state` as a checkpoint of the run folder, then remove those that `keep` newer good ones make superfluous.

    Returns its folder. A good checkpoint of the same step is left as it is. At least 2 are kept, whatever `keep` says.

    Raises:
        NotFiniteError: a weight, buffer or optimizer state is NaN or infinite; nothing is written.
        DiskFullError: what was saved before is intact, what was begun is removed.
        SetupError: the folder cannot be written, or does not give back what was written.
    """
    for stem in ("model", "ema", "optimizer"):
        _require_finite(stem, state.tensors.get(stem, {}))
    home = folder / "checkpoints"
    final = home / f"step-{state.position.step:08d}"
    with writing(folder):
        if not home.is_dir():
            home.mkdir()  # not its parent: a run folder that was removed stays so
            _sync(folder)
        for entry in home.iterdir():
            if _LEFTOVER.fullmatch(entry.name):  # of a writer that died: the run folder has one at a time
                remove(entry)
        if not _is_good(final):
            _write(state, final)
        _prune(home, final, max(keep, 2))
    return final


def newest(folder: Path, warn: Callable[[str], None]) -> State | None:
    """The newest good checkpoint of a run folder, or None where there is none; each bad one is named to `warn`.

    Raises:
        CheckpointError: there are checkpoints and none is good.
        SetupError: the folder cannot be read.
    """
    found = _found(folder / "checkpoints")
    for path in found:
        try:
            return load(path)
        except CheckpointError as error:
            warn(f"skipped a bad checkpoint: {error}")
    if found:
        raise CheckpointError(
            f"{folder / 'checkpoints'}: no good checkpoint among the {len(found)} there; "
            "start anew in another folder (output=...), or from model.init_from=<a .safetensors file>"
        )
    return None


def load(path: Path) -> State:
    """One checkpoint folder, verified: what is parsed are the very bytes that were hashed.

    Raises:
        CheckpointError: it is not whole, was changed, or is not a checkpoint.
    """
    manifest = _manifest(path)
    tensors = {}
    for name, entry in manifest.files.items():
        data = _contents(path / name, entry)
        try:
            tensors[name.removesuffix(".safetensors")] = _parsed(data)
        except ValueError as error:
            raise CheckpointError(f"{path}: {name} is not a safetensors file ({error})") from error
    return State(Position(manifest.step, manifest.epoch, manifest.step_in_epoch), tensors, manifest.facts)


def write_weights(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a .safetensors file for users, atomically: the name always holds a whole file.

    Raises:
        NotFiniteError, DiskFullError, SetupError: as `commit`; the file that was there before is intact.
    """
    _require_finite(path.name, tensors)
    draft = path.with_name(f".{path.name}.tmp")
    with writing(path.parent):
        remove(draft)  # of a writer that died, or whatever else has the name
        try:
            _write_file(draft, _serialised(tensors, {"format": "pt", **metadata}), "weights")
            _fault("rename", "weights")
            put(draft, path)
            _sync(path.parent)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights by plain name on the CPU, and the file's metadata.

    `path` is a .safetensors file, a run folder (its last.safetensors), a checkpoint folder (its averaged weights where
    it has them; metadata "weights" is "ema" or "model"), or a .pt or .pth file of tensors; pickled code is never run.

    Raises:
        CheckpointError: nothing usable there; says what to give.
    """
    wanted = "give a run folder, a checkpoint folder, or a .safetensors, .pt or .pth file of weights"
    file = path
    try:
        if path.is_dir():
            if (path / MANIFEST).exists() or _NAME.fullmatch(path.name):
                return _saved_weights(load(path))
            file = path / "last.safetensors"
        if not file.is_file():
            have = _found(path / "checkpoints")
            raise CheckpointError(f"{file} is not there; {f'give {have[0]}' if have else wanted}")
        if file.suffix in (".pt", ".pth"):
            return _unpickled(file), {}
        if file.suffix != ".safetensors":
            raise CheckpointError(f"{file} is not a kind of file that is read here; {wanted}")
        with safe_open(file, "pt") as whole:  # before anything as large as the file says is allocated
            metadata = whole.metadata() or {}
        return _parsed(file.read_bytes()), metadata
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror or error}); {wanted}") from error
    except (ValueError, SafetensorError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file ({error}); {wanted}") from error


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Writing


def _write(state: State, final: Path) -> None:
    """Write beside `final`, sync, read back, rename, sync the parent. Whatever fails, what was begun is removed."""
    draft = _aside(final)
    try:
        draft.mkdir()
        _fault("tmp")
        files = {}
        for stem, tensors in state.tensors.items():
            assert re.fullmatch(_STEM, stem), stem
            files[f"{stem}.safetensors"] = _write_file(draft / f"{stem}.safetensors", _serialised(tensors), "save")
        content = {"format": 1, **state.position._asdict(), "files": files, "facts": state.facts}
        _write_file(draft / MANIFEST, [_sealed(content)], "save")
        _sync(draft)
        _read_back(draft)
        _fault("rename")
        if os.path.lexists(final):  # not good, or we would not be here
            bad = _aside(final)
            final.rename(bad)
            draft.rename(final)
            remove(bad)
        else:
            draft.rename(final)
        _sync(final.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _read_back(draft: Path) -> None:
    try:
        _verify(draft)
    except CheckpointError as error:
        raise SetupError(f"{error}: the disk is at fault; choose another folder with output=...") from None


def _prune(home: Path, fresh: Path, keep: int) -> None:
    """Remove what is older than `keep` good checkpoints (bad ones do not count); renamed first, so never half there."""
    found = _found(home)
    if len(found) <= keep:
        return
    good, doomed = 0, []
    for path in found:
        if good >= keep and path != fresh:
            doomed.append(path)
        elif path == fresh or _is_good(path):
            good += 1
    drafts = [path.rename(_aside(path)) for path in doomed]
    _sync(home)
    _fault("prune")
    for draft in drafts:
        remove(draft)


def _serialised(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> list[memoryview]:
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


def _sealed(content: dict[str, Any]) -> memoryview:
    """The manifest's bytes, ending with the SHA-256 of all before."""
    body = json.dumps(content, indent=1).encode().removesuffix(b"\n}")
    return memoryview(body + b',\n "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n')


def _write_file(path: Path, parts: Iterable[memoryview], place: str) -> dict[str, Any]:
    """Write and sync one file. Returns its size and SHA-256, of the bytes in memory."""
    sha, size = hashlib.sha256(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        for part in parts:
            sha.update(part)
            size += len(part)
            while part:
                part = part[os.write(file, part[:CHUNK]) :]
            _fault("write", place)
        _fault("fsync", place)
        os.fsync(file)
    finally:
        os.close(file)
    return {"size": size, "sha256": sha.hexdigest()}


def _sync(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")


def _fault(point: str, place: str = "save") -> None:
    if faults.active:
        faults.fault(place, point)


def _require_finite(where: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        # A sum is 100 times cheaper than the exact test and finite only if all of it is; it may overflow, so ask again.
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all():
            advice = "nothing was saved over; lower optimizer.lr or set clip_grad_norm=1, then resume=auto"
            raise NotFiniteError(f"{name} ({where}) is not finite: {advice}")


# Reading


def _found(home: Path) -> list[Path]:
    """Folders with a checkpoint's name, newest first."""
    try:
        names = [path for path in home.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SetupError(f"{home} cannot be read ({error.strerror}); choose another folder with output=...") from error
    return sorted(names, key=lambda path: (int(path.name.removeprefix("step-")), path.name), reverse=True)


def _is_good(path: Path) -> bool:
    try:
        _verify(path)
    except CheckpointError:
        return False
    return True


def _verify(path: Path) -> None:
    for name, entry in _manifest(path).files.items():
        _contents(path / name, entry)


def _manifest(path: Path) -> _Manifest:
    """The manifest of a checkpoint folder: its seal first, then its types."""
    raw = _read(path / MANIFEST, MAX_MANIFEST)
    seal = _SEAL.search(raw)
    body = raw[: seal.start()] if seal else b""
    if not seal or hashlib.sha256(body).hexdigest().encode() != seal[1]:
        raise CheckpointError(f"{path}: {MANIFEST} is damaged (its own SHA-256 differs)")
    try:
        manifest = _Manifest.model_validate_json(body + b"\n}")
    except ValidationError as error:
        first = error.errors()[0]
        found = " ".join(f"{'.'.join(map(str, first['loc']))[:80]}: {first['msg']}".split())
        raise CheckpointError(f"{path}: {MANIFEST} makes no sense ({found})") from None
    name = _NAME.fullmatch(path.name)
    if name and int(name[1]) != manifest.step:
        raise CheckpointError(f"{path}: {MANIFEST} is of step {manifest.step}: the folder was renamed")
    return manifest


def _contents(file: Path, entry: _File) -> bytes:
    data = _read(file, entry.size)
    if len(data) != entry.size:
        raise CheckpointError(f"{file.parent}: {file.name} has {len(data)} bytes instead of {entry.size}")
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise CheckpointError(f"{file.parent}: {file.name} is damaged (its SHA-256 differs)")
    return data


def _read(file: Path, limit: int) -> bytes:
    """At most `limit` bytes of a regular file; more in it is an error."""
    try:
        with opened(file) as whole:
            size = os.fstat(whole.fileno()).st_size
            if size <= limit:
                return whole.read(size)
        found = f"has {size} bytes instead of at most {limit}"
    except FileNotFoundError:
        found = "is missing"
    except OSError as error:
        found = f"cannot be read ({error.strerror})"
    raise CheckpointError(f"{file.parent}: {file.name} {found}")


def _parsed(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises ValueError, of one line, for anything else."""
    try:
        return safetensors.torch.load(data)
    except MemoryError:
        raise
    except Exception as error:  # as many kinds as there are ways to be wrong
        raise ValueError(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from None


def _saved_weights(state: State) -> tuple[dict[str, Tensor], dict[str, str]]:
    model, ema = state.tensors.get("model", {}), state.tensors.get("ema", {})
    kind = "ema" if ema else "model"
    at = {"step": str(state.position.step), "epoch": str(state.position.epoch)}
    return {**model, **ema}, {"format": "pt", "weights": kind, **at}


def _refuse_to_inflate(file: Path) -> None:
    """torch stores tensors as they are: what would unpack to more than the file has was made to fill the memory."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as whole:
            if sum(entry.file_size for entry in whole.infolist()) > file.stat().st_size:
                raise ValueError("compressed")


def _unpickled(file: Path) -> dict[str, Tensor]:
    """Tensors of a .pt file: a state dict, or the one under "model" or "state_dict", where training scripts put it."""
    try:
        _refuse_to_inflate(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises about anything here
        advice = "nothing in it was executed; save the model's state_dict() with safetensors.torch.save_file, give that"
        raise CheckpointError(f"{file} is not a file of plain tensors ({type(error).__name__}); {advice}") from None
    for key in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{file} holds no dictionary of tensors; give a file with a model's state_dict()")
    return {str(name): tensor for name, tensor in content.items()}

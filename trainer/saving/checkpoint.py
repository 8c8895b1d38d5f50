"""Checkpoints of a run folder: commit, verify, discover, prune.

A checkpoint is a folder `checkpoints/step-00001234/` of safetensors files and a `manifest.json` that holds their sizes
and SHA-256 and a seal of its own. It is written beside its final name, synced, read back and only then renamed, so a
folder with a checkpoint's name is whole, whenever the writer was killed. What rots later is found by the hashes. Of
one that is read no more is in memory than is used: files are hashed piece by piece, tensors are views of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from trainer.errors import CheckpointError, SetupError
from trainer.saving.files import opened, remove, writing
from trainer.saving.tensor_files import fault_point, mapped, require_finite, serialised, sync_folder, write_synced

MANIFEST = "manifest.json"
MAX_MANIFEST = 64 * 2**20  # bytes; a run's history is far smaller
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
    tensors: dict[str, dict[str, Tensor]]  # "model", "optimizer", "ema", "rank-00000", ... -> tensors by plain name
    facts: dict[str, Any]  # JSON: history, run_id, topology {mode, world_size}

    def require_finite(self) -> None:
        """Raises NotFiniteError where a weight, buffer or optimizer state is NaN or infinite."""
        for part in ("model", "ema", "optimizer"):
            require_finite(part, self.tensors.get(part, {}))


_Count = Annotated[int, Field(ge=0, lt=2**63)]


class File(BaseModel):
    """One file of a checkpoint: its bytes, and their SHA-256 in hexadecimal."""

    model_config = ConfigDict(strict=True)

    size: _Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """What a checkpoint is: where its run stands, its files, and what the run remembers."""

    model_config = ConfigDict(strict=True)

    format: Annotated[int, Field(ge=1, le=1)]
    step: _Count
    epoch: _Count
    step_in_epoch: _Count
    files: dict[Annotated[str, Field(pattern=rf"^{_STEM}\.safetensors$")], File]
    facts: dict[str, Any]


def commit(folder: Path, state: State, keep: int, check: Callable[[], None] = lambda: None) -> Path:
    """Save `state` as a checkpoint of the run folder, then remove those that `keep` newer good ones make superfluous.

    Returns its folder. A good checkpoint of the same step is left as it is. At least 2 are kept, whatever `keep` says.
    `check` raises where nothing may be saved; it is asked last when all is written, which takes time.

    Raises:
        DiskFullError: what was saved before is intact, what was begun is removed.
        SetupError: the folder cannot be written, or does not give back what was written.
    """
    home = folder / "checkpoints"
    final = home / f"step-{state.position.step:08d}"
    with writing(folder):
        if not home.is_dir():
            home.mkdir()  # not its parent: a run folder that was removed stays so
            sync_folder(folder)
        for entry in home.iterdir():
            if _LEFTOVER.fullmatch(entry.name):  # of a writer that died: the run folder has one at a time
                remove(entry)
        if not _is_good(final):
            _write(state, final, check)
        _prune(home, final, max(keep, 2))
    return final


class GoodCheckpoint(NamedTuple):
    """A good checkpoint and its folder."""

    path: Path
    state: State


def newest(folder: Path, warn: Callable[[str], None]) -> GoodCheckpoint | None:
    """The newest good checkpoint of a run folder, or None where there is none; each bad one is named to `warn`.

    Raises:
        CheckpointError: there are checkpoints and none is good.
        SetupError: the folder cannot be read.
    """
    paths = checkpoints_in(folder / "checkpoints")
    for path in paths:
        try:
            return GoodCheckpoint(path, load(path))
        except CheckpointError as error:
            warn(f"skipped a bad checkpoint: {error}")
    if paths:
        raise CheckpointError(
            f"{folder / 'checkpoints'}: no good checkpoint among the {len(paths)} there; "
            "start anew in another folder (output=...), or from model.init_from=<a .safetensors file>"
        )
    return None


def load(path: Path) -> State:
    """One checkpoint folder: all its files are hashed now, and their tensors read when they are used.

    Raises:
        CheckpointError: it is not whole, was changed, or is not a checkpoint.
    """
    return assembled(path, _verify(path), lambda name: path / name)


def assembled(path: Path, manifest: Manifest, file: Callable[[str], str | Path]) -> State:
    """The state of a checkpoint whose verified files are at `file(name)`, which need not be in its folder `path`."""
    tensors = {}
    for name in manifest.files:
        try:
            tensors[name.removesuffix(".safetensors")] = mapped(file(name))
        except OSError as error:
            raise CheckpointError(f"{path}: {name} cannot be read ({error.strerror or error})") from error
        except ValueError as error:
            raise CheckpointError(f"{path}: {name} is not a safetensors file ({error})") from error
    return State(Position(manifest.step, manifest.epoch, manifest.step_in_epoch), tensors, manifest.facts)


def checkpoints_in(home: Path) -> list[Path]:
    """Folders with a checkpoint's name, newest first."""
    try:
        names = [path for path in home.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SetupError(f"{home} cannot be read ({error.strerror}); choose another folder with output=...") from error
    return sorted(names, key=lambda path: (int(path.name.removeprefix("step-")), path.name), reverse=True)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is meant to be a checkpoint, good or not."""
    return (folder / MANIFEST).exists() or _NAME.fullmatch(folder.name) is not None


# Writing


def _write(state: State, final: Path, check: Callable[[], None]) -> None:
    """Write beside `final`, sync, read back, rename, sync the parent. Whatever fails, what was begun is removed."""
    draft = _aside(final)
    try:
        draft.mkdir()
        fault_point("tmp")
        files = {}
        for stem, tensors in state.tensors.items():
            assert re.fullmatch(_STEM, stem), stem
            files[f"{stem}.safetensors"] = write_synced(draft / f"{stem}.safetensors", serialised(tensors), "save")
        content = {"format": 1, **state.position._asdict(), "files": files, "facts": state.facts}
        write_synced(draft / MANIFEST, [_sealed(content)], "save")
        sync_folder(draft)
        try:
            _verify(draft)
        except CheckpointError as error:
            raise SetupError(f"{error}: the disk is at fault; choose another folder with output=...") from None
        fault_point("rename")
        check()
        if os.path.lexists(final):  # not good, or we would not be here
            bad = _aside(final)
            final.rename(bad)
            draft.rename(final)
            remove(bad)
        else:
            draft.rename(final)
        sync_folder(final.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _prune(home: Path, fresh: Path, keep: int) -> None:
    """Remove what is older than `keep` good checkpoints (bad ones do not count); renamed first, so never half there."""
    paths = checkpoints_in(home)
    if len(paths) <= keep:
        return
    good, doomed = 0, []
    for path in paths:
        if good >= keep and path != fresh:
            doomed.append(path)
        elif path == fresh or _is_good(path):
            good += 1
    drafts = [path.rename(_aside(path)) for path in doomed]
    sync_folder(home)
    fault_point("prune")
    for draft in drafts:
        remove(draft)


def _sealed(content: dict[str, Any]) -> memoryview:
    """The manifest's bytes, ending with the SHA-256 of all before."""
    body = json.dumps(content, indent=1).encode().removesuffix(b"\n}")
    return memoryview(body + b',\n "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n')


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")


# Reading


def _is_good(path: Path) -> bool:
    try:
        _verify(path)
    except CheckpointError:
        return False
    return True


def _verify(path: Path) -> Manifest:
    """What a checkpoint is whose files are all as its manifest says."""
    manifest = understood(path, manifest_bytes(path))
    for name, entry in manifest.files.items():
        with reading(path / name, entry.size) as (file, size):
            if size != entry.size:
                raise CheckpointError(f"{path}: {name} has {size} bytes instead of {entry.size}")
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                raise CheckpointError(f"{path}: {name} is damaged (its SHA-256 differs)")
    return manifest


def manifest_bytes(path: Path) -> bytes:
    """The manifest of a checkpoint folder as it is."""
    with reading(path / MANIFEST, MAX_MANIFEST) as (file, size):
        return file.read(size)


def understood(path: Path, raw: bytes) -> Manifest:
    """What a manifest's bytes say: its seal first, then its types."""
    seal = _SEAL.search(raw)
    body = raw[: seal.start()] if seal else b""
    if not seal or hashlib.sha256(body).hexdigest().encode() != seal[1]:
        raise CheckpointError(f"{path}: {MANIFEST} is damaged (its own SHA-256 differs)")
    try:
        manifest = Manifest.model_validate_json(body + b"\n}")
    except ValidationError as error:
        first = error.errors()[0]
        fault = " ".join(f"{'.'.join(map(str, first['loc']))[:80]}: {first['msg']}".split())
        raise CheckpointError(f"{path}: {MANIFEST} makes no sense ({fault})") from None
    name = _NAME.fullmatch(path.name)
    if name and int(name[1]) != manifest.step:
        raise CheckpointError(f"{path}: {MANIFEST} is of step {manifest.step}: the folder was renamed")
    return manifest


@contextmanager
def reading(path: Path, limit: int) -> Iterator[tuple[BufferedReader, int]]:
    """A regular file of at most `limit` bytes, and how many it has."""
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise CheckpointError(f"{path.parent}: {path.name} has {size} bytes instead of at most {limit}")
            yield file, size
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path.parent}: {path.name} cannot be read ({error.strerror})") from None

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from trainer.errors import CheckpointError, SetupError
from trainer.saving.files import opened, remove, writing
from trainer.saving.tensor_files import (
    Piece,
    StoredTensor,
    fault_point,
    mapped,
    mapped_pieces,
    serialised,
    serialised_pieces,
    sync,
    whole,
    write_synced,
)

MANIFEST = "manifest.json"
MAX_MANIFEST = 64 * 2**20  # bytes; a run's history is far smaller
_NAME = re.compile(r"step-([0-9]{8,})")
_LEFTOVER = re.compile(r"step-[0-9]{8,}\.tmp-.+")
_STEM = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"  # no slash and no leading dot: a name can never leave its folder
OF_RANK = re.compile(r"(?!rank-)\w+-[0-9]{5,}")  # what one rank has of a part, not for itself
Fingerprint = list[tuple[str, int, int, int]]
_verified: dict[Path, Fingerprint] = {}  # by this process: what a good checkpoint was then
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
    pieces: dict[str, dict[str, Piece]] = field(default_factory=dict)  # "model-00001", ... -> what that rank has

    def part(self, name: str) -> dict[str, StoredTensor]:
        """A part of the state by plain name, from one file or those of several ranks; empty where there is none.

        Raises:
            CheckpointError: the files do not hold each row of a tensor once.
        """
        if name in self.tensors:
            return whole(self.tensors[name])
        by_name: dict[str, list[Piece]] = {}
        for stem, pieces in self.pieces.items():
            for key, piece in pieces.items() if stem.rpartition("-")[0] == name else ():
                known = by_name.setdefault(key, [])
                if not piece.is_whole or not known:  # a module without parameters may be in several stages
                    known.append(piece)
        try:
            return {key: StoredTensor(pieces) for key, pieces in by_name.items()}
        except ValueError as error:
            raise CheckpointError(f"the checkpoint of step {self.position.step}: {name}: {error}") from None


_Count = Annotated[int, Field(ge=0, lt=2**63)]


class File(BaseModel):
    """One file of a checkpoint: its bytes, and their SHA-256 in hexadecimal."""

    model_config = ConfigDict(strict=True)

    size: _Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """What a checkpoint is: where its run stands, its files, and what the run remembers."""

    model_config = ConfigDict(strict=True)

    format: Annotated[int, Field(ge=1, le=2)]
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
    with writing(folder):
        final = _final(folder, state.position.step)
        if not is_saved(folder, state.position.step):
            draft = begin(folder, state.position.step)
            with removed_unless_sealed(draft):
                seal(draft, state, write_files(draft, state), check)
        prune(final, keep)
    return final


def is_saved(folder: Path, step: int) -> bool:
    """Whether there is a good checkpoint of that step."""
    return _is_good(_final(folder, step))


def begin(folder: Path, step: int) -> Path:
    """Make the folder in which a checkpoint of `step` is written.

    What was left by writers that died is removed: the run folder has one at a time.
    """
    home = folder / "checkpoints"
    if not home.is_dir():
        home.mkdir()  # not its parent: a run folder that was removed stays so
        sync(folder)
    for entry in home.iterdir():
        if _LEFTOVER.fullmatch(entry.name):
            remove(entry)
    draft = _aside(_final(folder, step))
    with removed_unless_sealed(draft):
        draft.mkdir()
        fault_point("tmp")
    return draft


@contextmanager
def removed_unless_sealed(draft: Path) -> Iterator[None]:
    """Whatever fails within this block, what was begun is removed."""
    try:
        yield
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def write_files(draft: Path, state: State) -> dict[str, File]:
    """Write what this rank has of a checkpoint, each file synced and read back."""
    contents = {stem: serialised(tensors) for stem, tensors in state.tensors.items()}
    contents |= {stem: serialised_pieces(pieces) for stem, pieces in state.pieces.items()}
    files = {}
    for stem, content in contents.items():
        assert re.fullmatch(_STEM, stem), stem
        size, sha256 = write_synced(draft / f"{stem}.safetensors", content, "save")
        files[f"{stem}.safetensors"] = File(size=size, sha256=sha256)
    with _read_back():
        _check_files(draft, files)
    return files


@contextmanager
def _read_back() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise SetupError(f"{error}: the disk is at fault; choose another folder with output=...") from None


def seal(draft: Path, state: State, files: Mapping[str, File], check: Callable[[], None]) -> Path:
    """Make a checkpoint of a draft whose files are all written: its manifest, then its name, which is returned."""
    cut = any(OF_RANK.fullmatch(Path(name).stem) for name in files)
    listed = {name: files[name].model_dump() for name in sorted(files)}
    content = {"format": 1 + cut, **state.position._asdict(), "files": listed, "facts": state.facts}
    write_synced(draft / MANIFEST, [_sealed(content)], "save")
    sync(draft)
    with _read_back():
        understood(draft, manifest_bytes(draft))
    fault_point("rename")
    check()
    final = draft.with_name(draft.name.partition(".")[0])
    if os.path.lexists(final):  # not good, or there would be no draft
        bad = _aside(final)
        final.rename(bad)
        draft.rename(final)
        remove(bad)
    else:
        draft.rename(final)
    sync(final.parent)
    _verified[final.absolute()] = fingerprint(final)
    return final


def prune(fresh: Path, keep: int) -> None:
    """Remove what is older than `keep` good checkpoints (bad ones do not count); renamed first, so never half there."""
    paths, keep = checkpoints_in(fresh.parent), max(keep, 2)
    if len(paths) <= keep:
        return
    good, doomed = 0, []
    for path in paths:
        if good >= keep and path != fresh:
            doomed.append(path)
        elif path == fresh or _is_good(path):
            good += 1
    drafts = [path.rename(_aside(path)) for path in doomed]
    for path in doomed:
        _verified.pop(path.absolute(), None)
    sync(fresh.parent)
    fault_point("prune")
    for draft in drafts:
        remove(draft)


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
    state = State(Position(manifest.step, manifest.epoch, manifest.step_in_epoch), {}, manifest.facts)
    for name in manifest.files:
        stem = name.removesuffix(".safetensors")
        try:
            if OF_RANK.fullmatch(stem):
                state.pieces[stem] = mapped_pieces(file(name))
            else:
                state.tensors[stem] = mapped(file(name))
        except OSError as error:
            raise CheckpointError(f"{path}: {name} cannot be read ({error.strerror or error})") from error
        except ValueError as error:
            raise CheckpointError(f"{path}: {name} is not a safetensors file of this program ({error})") from error
    return state


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


def _final(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def _sealed(content: dict[str, Any]) -> memoryview:
    """The manifest's bytes, ending with the SHA-256 of all before."""
    body = json.dumps(content, indent=1).encode().removesuffix(b"\n}")
    return memoryview(body + b',\n "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n')


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")


def fingerprint(path: Path) -> Fingerprint:
    """What changes with a checkpoint's files: each one's name, inode, bytes and time of change. Raises OSError."""
    files = [(entry.name, entry.stat()) for entry in os.scandir(path)]
    return sorted((name, stat.st_ino, stat.st_size, stat.st_ctime_ns) for name, stat in files)


def _is_good(path: Path) -> bool:
    try:
        _verify(path)
    except CheckpointError:
        return False
    return True


def _verify(path: Path) -> Manifest:
    """What a checkpoint is whose files are all as its manifest says. One that is as it was then is not hashed again."""
    manifest = understood(path, manifest_bytes(path))
    try:
        now = fingerprint(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
    if _verified.get(path.absolute()) != now:
        _check_files(path, manifest.files)
        _verified[path.absolute()] = now
    return manifest


def _check_files(path: Path, files: Mapping[str, File]) -> None:
    """Raises CheckpointError where a file does not hold what it should."""
    for name, entry in files.items():
        with reading(path / name, entry.size) as (file, size):
            if size != entry.size:
                raise CheckpointError(f"{path}: {name} has {size} bytes instead of {entry.size}")
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                raise CheckpointError(f"{path}: {name} is damaged (its SHA-256 differs)")


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

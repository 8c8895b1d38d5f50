"""Write, verify, find and prune the checkpoints of a run folder.

A checkpoint is a folder `checkpoints/step-00001234/` that contains safetensors files and a
`manifest.json`. The manifest lists the size and the SHA-256 of each file and ends in a seal, which
is the SHA-256 of the manifest itself. The writer fills a draft folder next to the final path, syncs
it, reads it back, and then renames it. A folder with the name of a checkpoint is therefore
complete, even if the writer was killed. The hashes detect later damage. Loading needs little
memory, because files are hashed in chunks and tensors are views of memory-mapped files.
"""

import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from trainer.errors import CheckpointError, SetupError
from trainer.processes.terminal import Say
from trainer.saving.files import Json, open_regular, remove
from trainer.saving.tensor_files import (
    Shard,
    StoredTensor,
    fault_point,
    map_shards,
    serialize_shards,
    sync,
    write_synced,
)

MANIFEST = "manifest.json"
# Maximum size of a manifest in bytes. A checkpoint with a larger manifest counts as damaged. The
# history of a run, which a manifest contains, is far smaller.
MAX_MANIFEST = 64 * 2**20
_NAME = re.compile(r"step-([0-9]{8,})")
_LEFTOVER = re.compile(r"step-[0-9]{8,}\.tmp-.+")
# Names in a manifest have no slash and no leading dot, so they cannot point outside the folder.
_STEM = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
# Pattern of the name of a file with shards of one rank ("model-00001"). It does not match
# "rank-00001", the name of a file with state of one rank that consists of complete tensors.
OF_RANK = re.compile(r"(?!rank-)\w+-[0-9]{5,}")
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n\}\n\Z')

Fingerprint = list[tuple[str, int, int, int]]
# Fingerprints of the checkpoints that this process has verified. Hashing them again would take
# seconds per gigabyte.
_verified: dict[Path, Fingerprint] = {}


class Position(NamedTuple):
    """Progress of a run.

    If `step_in_epoch` equals the number of steps per epoch, only the evaluation of that epoch
    remains.

    Attributes:
        step: total number of completed optimizer steps.
        epoch: index of the current epoch, from 0.
        step_in_epoch: number of completed steps in the current epoch.
    """

    step: int
    epoch: int
    step_in_epoch: int


@dataclass(frozen=True)
class State:
    """State from which a run resumes.

    Attributes:
        position: progress of the run.
        shards: shards by name, for each file: a part that is saved in one file ("model",
            "optimizer", "ema", "rank-00000"), or the shards of one rank ("model-00001"). A complete
            tensor is a shard, too.
        facts: metadata that JSON can represent, such as "history", "run_id" and "topology", which
            has the mode and the number of ranks.
    """

    position: Position
    shards: dict[str, dict[str, Shard]]
    facts: Json

    def part(self, name: str) -> dict[str, StoredTensor]:
        """Return the tensors of a part, from one file or assembled from the shards of all ranks.

        Args:
            name: part, such as "model" or "optimizer".

        Returns:
            Tensors by name. Empty if the checkpoint does not have this part.

        Raises:
            CheckpointError: the shards of a tensor differ in shape or type, or they do not contain
                each row exactly once.
        """
        shards_by_name: dict[str, list[Shard]] = {}
        for stem, shards in self.shards.items():
            is_of_rank = OF_RANK.fullmatch(stem) and stem.rpartition("-")[0] == name
            if stem != name and not is_of_rank:
                continue
            for key, shard in shards.items():
                collected = shards_by_name.setdefault(key, [])
                # Several pipeline stages may save the buffers of one module. One copy is enough.
                if not shard.is_whole or not collected:
                    collected.append(shard)
        try:
            return {key: StoredTensor(shards) for key, shards in shards_by_name.items()}
        except ValueError as error:
            raise CheckpointError(
                f"the checkpoint of step {self.position.step}: {name}: {error}"
            ) from None

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a part as `part` does, but complete."""
        return {key: stored.read() for key, stored in self.part(name).items()}


_Count = Annotated[int, Field(ge=0, lt=2**63)]


class File(BaseModel, strict=True):
    """Size in bytes and SHA-256 (hexadecimal) of one file of a checkpoint."""

    size: _Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(BaseModel, strict=True):
    """Contents of manifest.json without its seal.

    Attributes:
        format: 2 if there are files with the shards of one rank, else 1.
        step: see `Position`.
        epoch: see `Position`.
        step_in_epoch: see `Position`.
        files: size and hash of each file by its name.
        facts: see `State`.
    """

    format: Annotated[int, Field(ge=1, le=2)]
    step: _Count
    epoch: _Count
    step_in_epoch: _Count
    files: dict[Annotated[str, Field(pattern=rf"^{_STEM}\.safetensors$")], File]
    facts: Json


def is_saved(folder: Path, step: int) -> bool:
    """Return whether the run folder has a good checkpoint of `step`."""
    return _is_good(_checkpoint_path(folder, step))


def create_draft(folder: Path, step: int) -> Path:
    """Create a draft folder for the checkpoint of `step`.

    Existing drafts are removed. They belong to writers that died, because a run writes one draft at
    a time.

    Args:
        folder: run folder.
        step: optimizer step of the checkpoint.

    Returns:
        The path of the draft.
    """
    checkpoints = folder / "checkpoints"
    if not checkpoints.is_dir():
        # `parents=True` is not used: it would create a run folder that the user has removed.
        checkpoints.mkdir()
        sync(folder)
    for entry in checkpoints.iterdir():
        if _LEFTOVER.fullmatch(entry.name):
            remove(entry)
    draft = _temporary_path(_checkpoint_path(folder, step))
    draft.mkdir()
    fault_point("tmp")
    return draft


def write_files(draft: Path, state: State) -> dict[str, File]:
    """Write this rank's files of a checkpoint. Each file is synced and read back.

    Args:
        draft: folder from `create_draft`.
        state: shards of this rank.

    Returns:
        Size and hash of each file by its name.

    Raises:
        SetupError: the disk returned other bytes than those written.
    """
    files = {}
    for stem, shards in state.shards.items():
        assert re.fullmatch(_STEM, stem), stem
        name = f"{stem}.safetensors"
        size, sha256 = write_synced(draft / name, serialize_shards(shards), "save")
        files[name] = File(size=size, sha256=sha256)
    with _blame_disk():
        _check_files(draft, files)
    return files


@contextmanager
def _blame_disk() -> Iterator[None]:
    """Convert a CheckpointError about a file that was just written into a SetupError."""
    try:
        yield
    except CheckpointError as error:
        raise SetupError(
            f"{error}: the disk did not keep what was written to it; choose another folder with "
            "output=..."
        ) from None


def seal(draft: Path, state: State, files: Mapping[str, File], check: Callable[[], None]) -> Path:
    """Write the manifest of a draft and rename it to the final path of the checkpoint.

    Args:
        draft: folder from `create_draft` that contains the files of all ranks.
        state: provides the position and the metadata.
        files: size and hash of each file in the draft by its name.
        check: called before the draft is renamed; raises if nothing may be saved.

    Returns:
        The path of the checkpoint.
    """
    is_sharded = any(OF_RANK.fullmatch(Path(name).stem) for name in files)
    content = {
        # Format 2 is format 1 with additional files that contain the shards of one rank.
        "format": 2 if is_sharded else 1,
        **state.position._asdict(),
        "files": {name: files[name].model_dump() for name in sorted(files)},
        "facts": state.facts,
    }
    write_synced(draft / MANIFEST, [_serialize_manifest(content)], "save")
    sync(draft)
    with _blame_disk():
        parse_manifest(draft, read_manifest(draft))
    fault_point("rename")
    check()
    final = draft.with_name(draft.name.partition(".")[0])
    # An existing checkpoint of this name is bad, because the caller does not save a step that has a
    # good one.
    bad = _temporary_path(final)
    if os.path.lexists(final):
        final.rename(bad)
    draft.rename(final)
    remove(bad)
    sync(final.parent)
    _verified[final.absolute()] = fingerprint(final)
    return final


Rank = Callable[[Manifest], float | None]


def prune(
    fresh: Path,
    keep: int,
    top_k: int,
    rank: Rank,
) -> None:
    """Remove checkpoints that are older than the newest `keep` good ones and not among the best.

    A checkpoint is renamed before its files are removed, so a kill does not leave an incomplete
    folder with the name of a checkpoint.

    Args:
        fresh: path of the checkpoint that was just written.
        keep: number of good checkpoints to keep. Values below 2 count as 2. Bad checkpoints are not
            counted.
        top_k: number of best good checkpoints to keep besides, whatever their age.
        rank: function that returns how good a checkpoint is; larger is better. None if it was not
            evaluated. Of equally good ones, the older is better.
    """
    paths = checkpoints_in(fresh.parent)
    keep = max(keep, 2)
    if len(paths) <= keep:
        return
    good_count = 0
    doomed = []
    for path in paths:
        if good_count >= keep and path != fresh:
            doomed.append(path)
        elif path == fresh or _is_good(path):
            good_count += 1
    ranks = {}
    # Rank from the oldest to the newest: the sort is stable, so the older one of two equally good
    # checkpoints comes first.
    for path in reversed(paths if top_k else ()):
        with suppress(CheckpointError):
            value = rank(_verify(path))
            if value is not None:
                ranks[path] = value
    best = sorted(ranks, key=lambda path: -ranks[path])[:top_k]
    drafts = []
    for path in doomed:
        if path not in best:
            drafts.append(path.rename(_temporary_path(path)))
            _verified.pop(path.absolute(), None)
    sync(fresh.parent)
    fault_point("prune")
    for draft in drafts:
        remove(draft)


class GoodCheckpoint(NamedTuple):
    """Checkpoint whose files have been verified.

    Attributes:
        path: folder of the checkpoint.
        state: state from which the run resumes.
    """

    path: Path
    state: State


def load_newest(folder: Path, warn: Say) -> GoodCheckpoint | None:
    """Load the newest good checkpoint of a run folder.

    Args:
        folder: run folder.
        warn: called with one line for each bad checkpoint that is skipped.

    Returns:
        The checkpoint, or None if the folder does not contain any.

    Raises:
        CheckpointError: all checkpoints in the folder are bad.
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
            f"{folder / 'checkpoints'}: no good checkpoint among {len(paths)}; start from scratch "
            "in another folder (output=...), or from model.init_from=<a .safetensors file>"
        )
    return None


def load(path: Path) -> State:
    """Verify and load one checkpoint.

    All files are hashed immediately. The tensors are memory-mapped, so they are read when they are
    used.

    Raises:
        CheckpointError: the folder is incomplete, was changed, or is not a checkpoint.
    """
    return build_state(path, _verify(path), path.joinpath)


def build_state(path: Path, manifest: Manifest, file: Callable[[str], str | Path]) -> State:
    """Build the state of a checkpoint from its verified files.

    Args:
        path: folder of the checkpoint, for messages.
        manifest: verified manifest.
        file: function that maps the name of a file to its path, which may be outside `path`.

    Raises:
        CheckpointError: a file cannot be read or is not a safetensors file of this program.
    """
    position = Position(manifest.step, manifest.epoch, manifest.step_in_epoch)
    state = State(position, {}, manifest.facts)
    for name in manifest.files:
        try:
            state.shards[name.removesuffix(".safetensors")] = map_shards(file(name))
        except OSError as error:
            raise CheckpointError(
                f"{path}: {name} cannot be read ({error.strerror or error})"
            ) from error
        except ValueError as error:
            raise CheckpointError(
                f"{path}: {name} is not a safetensors file of this program ({error})"
            ) from error
    return state


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the folders in `folder` that have the name of a checkpoint, newest first.

    Raises:
        SetupError: the folder cannot be read. A missing folder has no checkpoints.
    """
    try:
        paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SetupError(
            f"{folder} cannot be read ({error.strerror}); choose another folder with output=..."
        ) from error
    # Sorted by name alone, a step of nine digits could count as older than one of eight digits.
    paths.sort(key=lambda path: (int(path.name.removeprefix("step-")), path.name), reverse=True)
    return paths


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a manifest or the name of a checkpoint. It may be damaged."""
    return (folder / MANIFEST).exists() or _NAME.fullmatch(folder.name) is not None


def _checkpoint_path(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def _temporary_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")


def _serialize_manifest(content: Json) -> memoryview:
    """Serialize a manifest. The last entry is the SHA-256 of all bytes before it."""
    body = json.dumps(content, indent=1).encode().removesuffix(b"\n}")
    digest = hashlib.sha256(body).hexdigest().encode()
    return memoryview(body + b',\n "sha256": "' + digest + b'"\n}\n')


def fingerprint(path: Path) -> Fingerprint:
    """Return name, inode, size and change time of each file of a checkpoint, sorted by name.

    Raises:
        OSError: the folder cannot be read.
    """
    files = []
    for entry in os.scandir(path):
        status = entry.stat()
        files.append((entry.name, status.st_ino, status.st_size, status.st_ctime_ns))
    return sorted(files)


def _is_good(path: Path) -> bool:
    try:
        _verify(path)
    except CheckpointError:
        return False
    return True


def _verify(path: Path) -> Manifest:
    """Check all files of a checkpoint against its manifest, and return the manifest.

    A checkpoint that this process has verified is hashed again only if its fingerprint has changed.
    """
    manifest = parse_manifest(path, read_manifest(path))
    try:
        current = fingerprint(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
    if _verified.get(path.absolute()) != current:
        _check_files(path, manifest.files)
        _verified[path.absolute()] = current
    return manifest


def _check_files(path: Path, files: Mapping[str, File]) -> None:
    """Raise CheckpointError if the size or the SHA-256 of a file differs from its entry."""
    for name, expected in files.items():
        with open_limited(path / name, expected.size) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected.size:
                raise CheckpointError(f"{path}: {name} has {size} bytes instead of {expected.size}")
            if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                raise CheckpointError(f"{path}: {name} is damaged (its SHA-256 differs)")


def read_manifest(path: Path) -> bytes:
    """Read the manifest of a checkpoint folder without verifying it."""
    with open_limited(path / MANIFEST, MAX_MANIFEST) as file:
        return file.read()


def parse_manifest(path: Path, raw: bytes) -> Manifest:
    """Verify the seal of a manifest and parse it.

    Args:
        path: folder of the checkpoint; its name must agree with the step in the manifest.
        raw: bytes of manifest.json.

    Raises:
        CheckpointError: the seal, the step or the type of an entry is wrong.
    """
    seal = _SEAL.search(raw)
    body = raw[: seal.start()] if seal else b""
    if not seal or hashlib.sha256(body).hexdigest().encode() != seal[1]:
        raise CheckpointError(f"{path}: {MANIFEST} is damaged (its own SHA-256 differs)")
    try:
        manifest = Manifest.model_validate_json(body + b"\n}")
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"]))[:80]
        # Text from the file may contain line breaks, but a message is one line.
        fault = " ".join(f"{location}: {first['msg']}".split())
        raise CheckpointError(f"{path}: {MANIFEST} is invalid ({fault})") from None
    name = _NAME.fullmatch(path.name)
    if name and int(name[1]) != manifest.step:
        raise CheckpointError(
            f"{path}: {MANIFEST} is of step {manifest.step}: the folder was renamed"
        )
    return manifest


@contextmanager
def open_limited(path: Path, limit: int) -> Iterator[BufferedReader]:
    """Open a regular file of at most `limit` bytes within this block.

    Raises:
        CheckpointError: the file is missing, too large or unreadable.
    """
    try:
        with open_regular(path, limit) as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(
            f"{path.parent}: {path.name} cannot be read ({error.strerror})"
        ) from None

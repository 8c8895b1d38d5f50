"""One checkpoint on every rank: read where a rank finds it, sent by rank 0 where it does not."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import torch

from trainer.errors import CheckpointError, SetupError
from trainer.processes.world import World
from trainer.saving.checkpoint import (
    Fingerprint,
    GoodCheckpoint,
    Manifest,
    State,
    assembled,
    fingerprint,
    load,
    manifest_bytes,
    reading,
    understood,
)
from trainer.saving.tensor_files import CHUNK


def on_every_rank(newest: GoodCheckpoint | None, world: World) -> State | None:
    """Rank 0's checkpoint, None where it has none; collective.

    A rank that finds the very same files, which rank 0 has hashed, or whole copies of them, reads from these. Where one
    does not, as on another machine that does not share the run folder, rank 0 sends the files in pieces, and that rank
    keeps them in temporary ones. Raises CheckpointError where rank 0's files changed meanwhile.
    """
    described: tuple[Path, bytes, Fingerprint] | None = world.broadcast_object(
        (newest.path, manifest_bytes(newest.path), fingerprint(newest.path)) if newest else None
    )
    if described is None:
        return None
    path, raw, files = described
    state = newest.state if newest else found_here(path, raw, files)
    if world.max_(torch.tensor(float(state is None))).item():
        received = _sent(path, understood(path, raw), world, wanted=state is None)
        state = state or received
    return state


def found_here(path: Path, raw: bytes, files: Fingerprint) -> State | None:
    """The checkpoint of this manifest, where this rank finds it whole; rank 0's very `files` are not hashed again."""
    try:
        if manifest_bytes(path) != raw:
            return None
        return assembled(path, understood(path, raw), path.joinpath) if fingerprint(path) == files else load(path)
    except (CheckpointError, OSError):
        return None


def _sent(path: Path, manifest: Manifest, world: World, wanted: bool) -> State | None:
    """Every file from rank 0, for the ranks that want them."""
    with ExitStack() as closing:
        kept: dict[str, BinaryIO] = {}
        for name, entry in manifest.files.items():
            source = closing.enter_context(reading(path / name, entry.size))[0] if world.is_main else None
            target = closing.enter_context(_temporary(path)) if wanted else None
            sha = hashlib.sha256()
            for start in range(0, entry.size, CHUNK):
                piece = bytearray(min(CHUNK, entry.size - start))
                if source:
                    source.readinto(piece)
                world.broadcast_(torch.frombuffer(piece, dtype=torch.uint8))
                sha.update(piece)
                if target:
                    target.write(piece)
            if sha.hexdigest() != entry.sha256:
                raise CheckpointError(f"{path}: {name} changed while it was sent to other machines")
            if target:
                target.flush()
                kept[name] = target
        # The files have no names, and last as long as what is read from them.
        return assembled(path, manifest, lambda name: f"/dev/fd/{kept[name].fileno()}") if wanted else None


@contextmanager
def _temporary(path: Path) -> Iterator[BinaryIO]:
    """A file that no one else sees."""
    try:
        with tempfile.TemporaryFile() as file:
            yield file
    except OSError as error:
        raise SetupError(
            f"{path} is not on this machine, and there is no room for it in {tempfile.gettempdir()} "
            f"({error.strerror}): let all machines share the run folder, or set TMPDIR to a larger folder"
        ) from error

"""The folder of predictions: held by one command, and complete under its name or not there.

At the end rank 0 puts the parts together that the ranks have written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.commands.predict.rows import COUNTS, check_settings, header
from trainer.errors import FolderInUseError
from trainer.processes.rank import place
from trainer.processes.world import World, lost_peers
from trainer.saving import locks
from trainer.saving.files import draft_of, put, read_json, writing

BLOCK = 2**24  # bytes of a part that travel at once


def claim(folder: Path) -> None:
    """Make the folder, and hold it as long as this process lives; the ranks of a job share it.

    Raises:
        FolderInUseError: another command writes there.
        SetupError: it cannot be written.
    """
    locks.hold(folder, "command", f".lock-{place().rank:04}")
    if (folder / "recipe.yaml").exists() or (folder / "result.json").exists():
        raise FolderInUseError(f"{folder} holds a training run; choose another output=")


def complete(folder: Path, final: Path, settings: Mapping[str, Any]) -> dict[str, int] | None:
    """The counts of a command that has written all rows already, else None.

    Raises:
        FolderInUseError: they are, of other settings.
    """
    try:
        before = read_json(folder / "predict.json")
    except (OSError, ValueError):
        return None
    if not isinstance(before.get("settings"), dict) or not all(isinstance(before.get(key), int) for key in COUNTS):
        return None
    check_settings(folder, before["settings"], settings)
    return {key: before[key] for key in COUNTS} if final.is_file() else None


def put_together(world: World, folder: Path, final: Path) -> None:
    """Every rank's part in one file on rank 0, in the order of the ranks, complete or not there at all."""
    part = folder / f"part-{world.rank:04}"
    if not world.is_main:
        _send(part)
    else:
        draft = draft_of(final)
        with writing(folder, f"the same words with output={folder} go on from here"):
            try:
                with draft.open("wb") as whole:
                    whole.write(header(final.suffix[1:]).encode())
                    with part.open("rb") as rows:
                        shutil.copyfileobj(rows, whole)
                    for rank in range(1, world.size):
                        _receive(rank, whole)
                    whole.flush()
                    os.fsync(whole.fileno())
                put(draft, final)
            finally:
                draft.unlink(missing_ok=True)
    world.barrier()
    for name in (part, part.with_suffix(".json")):
        name.unlink(missing_ok=True)


def _send(part: Path) -> None:
    """Nodes need not share a disk, so parts travel between ranks."""
    import torch.distributed as dist

    size = torch.tensor(part.stat().st_size)
    with part.open("rb") as file, lost_peers():
        dist.send(size, 0)
        while block := file.read(BLOCK):
            dist.send(torch.frombuffer(bytearray(block), dtype=torch.uint8), 0)


def _receive(rank: int, whole: Any) -> None:
    import torch.distributed as dist

    size = torch.tensor(0)
    with lost_peers():
        dist.recv(size, rank)
        for start in range(0, int(size), BLOCK):
            block = torch.empty(min(BLOCK, int(size) - start), dtype=torch.uint8)
            dist.recv(block, rank)
            whole.write(block.numpy())

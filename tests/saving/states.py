"""Small states to save, and what tests of saving ask of a folder."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.saving.checkpoint import (
    Position,
    State,
    create_draft,
    is_saved,
    load_newest,
    prune,
    seal,
    write_files,
)
from trainer.saving.files import report_write_errors
from trainer.saving.tensor_files import Shard, wrap_tensors


def whole(parts: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Shard]]:
    """Return the shards of parts that are saved in one file each."""
    return {stem: wrap_tensors(tensors) for stem, tensors in parts.items()}


def make(step: int, size: int = 64) -> State:
    """Return a small state in which every value depends on the step."""
    base = torch.arange(size, dtype=torch.float32) * 0.5 + step
    return State(
        Position(step, step // 10, step % 10),
        whole(
            {
                "model": {
                    "fc.weight": base.view(2, -1),
                    "bn.num_batches_tracked": torch.tensor(step),
                },
                "optimizer": {
                    "fc.weight//momentum_buffer": base.neg(),
                    "fc.weight//step": torch.tensor(float(step)),
                },
                "ranks": {"0/torch_rng": torch.full((size,), step % 256, dtype=torch.uint8)},
            }
        ),
        {
            "run_id": "host-1",
            "topology": {"mode": "ddp", "world_size": 2},
            "losses": [0.1 * step, 1 / 3],
        },
    )


def commit(
    folder: Path,
    state: State,
    keep: int,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Save `state` like `Saver` does, but immediately and by one rank, and return the checkpoint's
    folder.
    """
    with report_write_errors(folder):
        final = folder / "checkpoints" / f"step-{state.position.step:08d}"
        if not is_saved(folder, state.position.step):
            draft = create_draft(folder, state.position.step)
            try:
                seal(draft, state, write_files(draft, state), check)
            except BaseException:
                shutil.rmtree(draft)
                raise
        prune(final, keep, 0, lambda manifest: None)
    return final


def same(one: State, other: State) -> bool:
    def flat(state: State) -> dict[tuple[str, str], Tensor]:
        return {
            (stem, name): shard.local
            for stem, shards in state.shards.items()
            for name, shard in shards.items()
        }

    a = flat(one)
    b = flat(other)
    equal = all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a.keys() & b.keys())
    return (
        equal
        and a.keys() == b.keys()
        and (one.position, one.facts) == (other.position, other.facts)
    )


def newest_state(folder: Path, warn: Callable[[str], None]) -> State | None:
    actual = load_newest(folder, warn)
    assert actual is None or actual.path.parent == folder / "checkpoints"
    return actual and actual.state


def refuse(line: str) -> None:
    raise AssertionError(f"unexpected warning: {line}")


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in (folder / "checkpoints").iterdir())


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


def trace(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the writes to disk in order from now on; drafts appear under their final name."""
    calls: list[str] = []

    def plain(path: object) -> str:
        return re.sub(r"\.tmp(-[0-9a-f]+)?$", "", Path(str(path)).name)

    def record(kind: str) -> None:
        real = getattr(os, kind)

        def recorded(*words: Any) -> Any:
            target = f"/proc/self/fd/{words[0]}"
            calls.append(
                f"{kind} {plain(os.readlink(target) if isinstance(words[0], int) else words[0])}"
            )
            return real(*words)

        monkeypatch.setattr(os, kind, recorded)

    for kind in ("write", "fsync", "rename", "replace"):
        record(kind)
    return calls


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)

"""Checkpoints survive full disks and rot; test_saver.py kills who writes them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line import digest
from tests.saving.states import (
    commit,
    flip,
    make,
    names,
    newest_state,
    one_line,
    refuse,
    same,
    trace,
    whole,
)
from trainer.errors import CheckpointError, DiskFullError, FolderInUseError, SetupError
from trainer.saving import checkpoint
from trainer.saving.checkpoint import Position, State, load, load_newest, prune
from trainer.saving.weights import save_weights

# Saving and loading


def test_round_trip_of_every_kind_of_tensor(tmp_path: Path) -> None:
    shared = torch.randn(6, 4)
    tensors = {
        "bf16": torch.randn(3).bfloat16(),
        "half": torch.randn(3).half(),
        "double": torch.tensor(1 / 3, dtype=torch.float64),
        "count": torch.tensor(2**62 + 1),
        "flag": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "tied": shared,
        "tied_again": shared,
        "view": shared[1:3],
        "transposed": shared.t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    facts = {
        "losses": [random.random() * 10**k for k in range(-9, 9)],
        "best": None,
        "name": 'é"\\/\n',
        "big": 10**30,
    }
    state = State(
        Position(123456789, 7, 3),
        whole({"model": tensors, "ema": {}, "ranks": {"0/rng": torch.get_rng_state()}}),
        facts,
    )
    path = commit(tmp_path, state, keep=2)
    assert path == tmp_path / "checkpoints" / "step-123456789"
    loaded = newest_state(tmp_path, refuse)
    assert loaded is not None and same(loaded, state) and same(load(path), state)
    model = loaded.tensors("model")
    assert all(tensor.is_contiguous() for tensor in model.values())
    model["tied"].zero_()  # writable, and no longer tied
    assert torch.equal(model["tied_again"], shared)


def test_a_manifest_lists_all_files(tmp_path: Path) -> None:
    path = commit(tmp_path, make(12), keep=2)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["epoch"], manifest["step_in_epoch"]) == (
        1,
        12,
        1,
        2,
    )
    assert manifest["facts"]["topology"] == {"mode": "ddp", "world_size": 2}
    assert sorted(path.iterdir()) == sorted(
        [path / "manifest.json", *(path / name for name in manifest["files"])]
    )
    for name, entry in manifest["files"].items():
        assert entry == {"size": (path / name).stat().st_size, "sha256": digest(path / name)}


def test_discovery_takes_full_names_only(tmp_path: Path) -> None:
    assert newest_state(tmp_path / "absent", refuse) is None
    (tmp_path / "checkpoints").mkdir()
    assert newest_state(tmp_path, refuse) is None
    path = commit(tmp_path, make(9), keep=2)
    home = path.parent
    for name in (
        "step-00000099.tmp-abc",
        "step-99",
        "step-0000009٣",
        "xstep-00000099",
        "step-00000099x",
        "notes",
    ):
        shutil.copytree(path, home / name)
    (home / "step-00000098").write_text("a file")
    (home / ".DS_Store").write_text("")
    loaded = newest_state(tmp_path, refuse)
    assert loaded is not None and loaded.position.step == 9
    # Ordered by number and not by letters; the new one is never pruned.
    for step in (
        100_000_000,
        99_999_999,
    ):
        assert commit(tmp_path, make(step), keep=2).is_dir()
    loaded = newest_state(tmp_path, refuse)
    assert loaded is not None and loaded.position.step == 100_000_000


@pytest.mark.parametrize(
    ("top_k", "left"),
    [
        (0, [5, 6]),
        (1, [2, 5, 6]),
        (2, [2, 4, 5, 6]),
        (9, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_pruning_keeps_the_best_besides_the_newest(
    tmp_path: Path, top_k: int, left: list[int]
) -> None:
    # Steps 2 and 4 are equally good.
    values = dict(enumerate((0.1, 0.9, 0.2, 0.9, 0.3, 0.0), 1))
    for step in values:
        path = commit(tmp_path, make(step), keep=9)
    prune(path, 2, top_k, lambda manifest: values.get(manifest.step))
    assert names(tmp_path) == [f"step-{step:08d}" for step in left]


def test_pruning_counts_only_intact_checkpoints_among_the_best(tmp_path: Path) -> None:
    for step in range(1, 7):
        path = commit(tmp_path, make(step), keep=9)
    (tmp_path / "checkpoints" / "step-00000002" / "model.safetensors").write_bytes(b"damaged")
    (tmp_path / "checkpoints" / "step-00000006" / "model.safetensors").write_bytes(b"damaged")
    # The newest is worst and damaged, so that two older ones and the best intact one are kept.
    prune(path, 2, 1, lambda manifest: -abs(manifest.step - 2.4))
    assert names(tmp_path) == [f"step-{step:08d}" for step in (3, 5, 6)]
    newest = load_newest(tmp_path, lambda line: None)
    assert newest
    assert newest.path.name == "step-00000005"


@pytest.mark.parametrize(
    "keep, left", [(0, [4, 5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])]
)
def test_pruning_keeps_that_many(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in range(1, 6):
        commit(tmp_path, make(step), keep)
    assert names(tmp_path) == [f"step-{step:08d}" for step in left]


def test_pruning_counts_only_good_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        commit(tmp_path, make(step), keep=9)
    flip(tmp_path / "checkpoints" / "step-00000003" / "model.safetensors", 200)
    commit(tmp_path, make(4), keep=2)
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]
    commit(tmp_path, make(5), keep=2)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]


def test_a_good_checkpoint_is_never_overwritten_and_a_bad_one_is_replaced(tmp_path: Path) -> None:
    path = commit(tmp_path, make(7), keep=2)
    before = (path / "manifest.json").stat().st_ino
    commit(tmp_path, make(7), keep=2)
    assert (path / "manifest.json").stat().st_ino == before
    flip(path / "model.safetensors", 150)
    commit(tmp_path, make(7), keep=2)
    assert same(load(path), make(7)) and names(tmp_path) == [path.name]
    shutil.rmtree(path)
    path.write_text("a file in the way")
    commit(tmp_path, make(7), keep=2)
    assert same(load(path), make(7)) and names(tmp_path) == [path.name]


def test_leftovers_of_dead_writers_go_and_nothing_else(tmp_path: Path) -> None:
    home = tmp_path / "checkpoints"
    (home / "step-00000001.tmp-0123" / "deep").mkdir(parents=True)
    (home / "step-00000002.tmp-4567").write_text("a file")
    (home / "mine.tmp-1").mkdir()
    commit(tmp_path, make(3), keep=2)
    assert names(tmp_path) == ["mine.tmp-1", "step-00000003"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    for attempt in (
        lambda: commit(tmp_path / "run", make(1), keep=2),
        lambda: commit(tmp_path / "run" / "gone", make(1), keep=2),
        lambda: save_weights(tmp_path / "run" / "last.safetensors", {}, {}),
    ):
        with pytest.raises(SetupError, match="output=") as caught:
            attempt()
        assert caught.value.code == 3 and str(tmp_path / "run") in one_line(caught.value)


def test_everything_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        commit(tmp_path, make(step), keep=2)
    calls = trace(monkeypatch)
    commit(tmp_path, make(3), keep=2)
    files = ["model.safetensors", "optimizer.safetensors", "ranks.safetensors"]
    writes = [call for name in files for call in (f"write {name}", f"fsync {name}")]
    seal = ["write manifest.json", "fsync manifest.json", "fsync step-00000003"]
    named = [
        "rename step-00000003",
        "fsync checkpoints",
        "rename step-00000001",
        "fsync checkpoints",
    ]
    assert [call for call, _ in groupby(calls)] == [*writes, *seal, *named]


def test_a_disk_that_gives_back_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, make(1), keep=2)
    write = os.write
    monkeypatch.setattr(
        os,
        "write",
        lambda file, data: write(file, bytes(len(data))),
    )
    with pytest.raises(SetupError, match="disk"):
        commit(tmp_path, make(2), keep=2)
    assert names(tmp_path) == ["step-00000001"]


# Rot


def test_every_flip_and_every_cut_is_found(tmp_path: Path, full: bool) -> None:
    dice = random.Random(0)
    commit(tmp_path, make(1, 16), keep=2)
    newer = commit(tmp_path, make(2, 16), keep=2)
    whole = {path: path.read_bytes() for path in sorted(newer.iterdir())}
    for _ in range(10_000 if full else 200):
        path, data = dice.choice(list(whole.items()))
        where = dice.randrange(len(data))
        kind = dice.choice(["flip", "flip", "cut", "longer"])
        if kind == "flip":
            flip(path, where, dice.randrange(8))
        else:
            path.write_bytes(data[:where] if kind == "cut" else data + data[-1 - where % 8 :])
        warnings: list[str] = []
        loaded = newest_state(tmp_path, warnings.append)
        assert loaded is not None and same(loaded, make(1, 16)), (path, kind, where)
        assert len(warnings) == 1
        assert str(newer) in warnings[0]
        assert path.name in warnings[0]
        assert "\n" not in warnings[0]
        path.write_bytes(data)
    assert same(load(newer), make(2, 16))


@pytest.mark.slow
def test_every_byte_of_a_manifest_counts(tmp_path: Path) -> None:
    path = commit(tmp_path, make(1, 8), keep=2)
    file = path / "manifest.json"
    data = file.read_bytes()
    for where in range(len(data)):
        # The bit between small and capital letters: JSON and hexadecimal would forgive it.
        flip(file, where, 5)
        with pytest.raises(CheckpointError):
            load(path)
        file.write_bytes(data)


def test_a_missing_file_a_folder_in_its_place_and_a_renamed_checkpoint(tmp_path: Path) -> None:
    path = commit(tmp_path, make(1), keep=2)
    moved = path.rename(path.with_name("step-00000077"))
    with pytest.raises(CheckpointError, match="renamed"):
        load(moved)
    path = moved.rename(path)
    for name in ("manifest.json", "ranks.safetensors"):
        (path / name).rename(tmp_path / "away")
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            load(path)
        (path / name).mkdir()
        with pytest.raises(CheckpointError, match=rf": {name} .*\(.*\bfile\)"):
            load(path)
        (path / name).rmdir()
        os.mkfifo(path / name)  # Nobody writes to this pipe.
        with pytest.raises(CheckpointError, match=rf": {name} .*\(.*\bfile\)"):
            load(path)
        (path / name).unlink()
        (tmp_path / "away").rename(path / name)
    (path / "notes.txt").write_text("extra files are the user's own business")
    assert same(load(path), make(1))


def test_none_good_is_exit_4(tmp_path: Path) -> None:
    for step in (1, 2):
        flip(commit(tmp_path, make(step), keep=2) / "optimizer.safetensors", -1)
    warnings: list[str] = []
    with pytest.raises(CheckpointError, match=r"no good checkpoint.*\b2\b") as caught:
        newest_state(tmp_path, warnings.append)
    assert caught.value.code == 4 and str(tmp_path) in one_line(caught.value)
    assert [f"step-0000000{step}" in line for step, line in zip((2, 1), warnings, strict=True)] == [
        True,
        True,
    ]


def test_a_sealed_manifest_of_nonsense(tmp_path: Path) -> None:
    """Whoever can write the folder can seal anything, but the error must still be one line."""
    path = commit(tmp_path, make(1), keep=2)
    good = json.loads((path / "manifest.json").read_text())
    del good["sha256"]
    entry = {"size": 1, "sha256": "0" * 64}
    (tmp_path / "checkpoints" / "outside.safetensors").write_bytes(b"x")
    cases: list[dict[str, Any]] = [
        *({key: value for key, value in good.items() if key != absent} for absent in good),
        *({**good, key: value} for key in good for value in ("1", None, True, 1.5, -1, [1], 2**70)),
        *(
            {**good, "files": {name: entry}}
            for name in ("../outside.safetensors", "/etc/passwd", "a/b.safetensors")
        ),
        *(
            {**good, "files": {name: entry}}
            for name in ("", "..", ".safetensors", "x\0.safetensors", "manifest.json")
        ),
        {**good, "files": {"model.safetensors": {"size": 10**18, "sha256": "0" * 64}}},
        {**good, "files": {"model.safetensors": {"size": "1", "sha256": 5}}},
    ]
    for content in cases:
        (path / "manifest.json").write_bytes(checkpoint._serialize_manifest(content))
        with pytest.raises(CheckpointError) as caught:
            load(path)
        assert str(path) in one_line(caught.value)
    deep = json.dumps({**good, "facts": 0}, indent=1).replace(
        '"facts": 0', '"facts": ' + '{"a":' * 90_000 + "1" + "}" * 90_000
    )
    raw = b'{"format": 1, "step": ' + b"9" * 100_000 + b"\n}"
    for text in (deep.encode(), raw, b"[1\n}", b"\xff\xfe\n}", b"\n}"):
        body = text.removesuffix(b"\n}")
        seal = f',\n "sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'
        (path / "manifest.json").write_bytes(body + seal.encode())
        with pytest.raises(CheckpointError) as caught:
            load(path)
        assert len(one_line(caught.value)) < 1000


# A full disk


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_full_at_any_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool, reason: int
) -> None:
    for step in (1, 2):
        commit(tmp_path, make(step), keep=2)
    save_weights(tmp_path / "last.safetensors", {"w": torch.ones(3)}, {})
    weights = digest(tmp_path / "last.safetensors")
    total = sum(
        file.stat().st_size for file in (tmp_path / "checkpoints" / "step-00000002").iterdir()
    )
    write = os.write
    dice = random.Random(reason)
    left = 0

    def limited(file: int, data: memoryview) -> int:
        nonlocal left
        if not left:
            raise OSError(reason, os.strerror(reason))
        finished = write(file, data[:left])
        left -= finished
        return finished

    monkeypatch.setattr(os, "write", limited)
    for _ in range(300 if full else 10):
        left = dice.randrange(total)
        with pytest.raises(DiskFullError) as caught:
            commit(tmp_path, make(3), keep=2)
        assert caught.value.code == 28 and str(tmp_path) in one_line(caught.value)
        assert names(tmp_path) == ["step-00000001", "step-00000002"]
        left = dice.randrange(80)
        with pytest.raises(DiskFullError):
            save_weights(tmp_path / "last.safetensors", {"w": torch.zeros(3)}, {})
        assert sorted(os.listdir(tmp_path)) == ["checkpoints", "last.safetensors"]
        assert digest(tmp_path / "last.safetensors") == weights
    monkeypatch.undo()
    assert [
        same(load(tmp_path / "checkpoints" / f"step-0000000{step}"), make(step)) for step in (1, 2)
    ] == [True, True]
    assert commit(tmp_path, make(3), keep=2).is_dir()


def test_a_save_that_became_invalid_while_written_is_not_sealed(tmp_path: Path) -> None:
    """A run may be held still while it writes, and wake in a folder that another run has by now."""

    def lost() -> None:
        raise FolderInUseError("another run's by now")

    first = commit(tmp_path, make(1), 2)
    with pytest.raises(FolderInUseError):
        commit(tmp_path, make(2), 2, lost)
    with pytest.raises(FolderInUseError):
        save_weights(tmp_path / "last.safetensors", {"w": torch.ones(2)}, {}, lost)
    assert names(tmp_path) == [first.name]
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoints"]

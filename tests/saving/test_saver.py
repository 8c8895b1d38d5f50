"""Ranks write during training: each writes its files and rank 0 seals them, whatever happens to one
of them meanwhile.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tests.command_line import environment
from tests.saving.states import commit, names, newest_state, refuse, whole
from trainer.errors import DiskFullError, PeerError, SetupError
from trainer.processes import faults
from trainer.saving import checkpoint, saver
from trainer.saving.checkpoint import File, Position, State, create_draft
from trainer.saving.saver import Save, Saver
from trainer.saving.tensor_files import Shard, serialize, write_synced
from trainer.saving.weights import read_weights

WHOLE = {
    "fc.weight": torch.arange(12.0).view(6, 2),
    "fc.bias": torch.arange(3.0),
    "step": torch.tensor(7),
}


def shards_of(
    rank: int,
    ranks: int,
    added: int = 0,
) -> dict[str, Shard]:
    """Return the shards of each tensor, split like by `torch.chunk`, and tensors without rows on
    rank 0; a number is added to each value.
    """
    pieces = {}
    for name, tensor in ((name, tensor + added) for name, tensor in WHOLE.items()):
        rows = -(-len(tensor) // ranks) if tensor.dim() else 0
        local = tensor[rows * rank : rows * (rank + 1)] if rows else tensor
        if len(local) if rows else rank == 0:
            pieces[name] = Shard(local, tensor.shape, rows * rank)
    return pieces


def saving(
    draft: Path,
    rank: int,
    ranks: int,
    step: int = 1,
    sealed: bool = True,
    added: int = 0,
    timeout: float = 20.0,
) -> Saver:
    """A rank's saver at work."""
    folder = draft.parents[1]
    stems = {f"model-{rank:05d}": pieces for pieces in [shards_of(rank, ranks, added)] if pieces}
    state = State(Position(step, 0, step), stems, {"step": step})
    weights = {} if rank else {folder / "last.safetensors": {"step": str(step)}}
    save = Save(
        folder,
        draft,
        sealed,
        state,
        frozenset(range(1, ranks)),
        weights,
        "model",
        2,
        lambda: None,
        0,
        lambda manifest: None,
    )
    each = Saver(rank, timeout)
    each.start(save, time.perf_counter())
    return each


def written(
    folder: Path, ranks: int, step: int = 1, sealed: bool = True, order: int = 1
) -> list[Saver]:
    """The savers of all ranks, once they have written."""
    draft = create_draft(folder, step)
    savers = [saving(draft, rank, ranks, step, sealed) for rank in range(ranks)[::order]]
    for each in savers:
        each.wait()
    return savers


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_of_all_ranks_become_one_checkpoint_and_one_file_of_weights(
    ranks: int, order: int, tmp_path: Path
) -> None:
    assert [each.error for each in written(tmp_path, ranks, order=order)] == [None] * ranks
    assert names(tmp_path) == ["step-00000001"], "no draft is left"
    state = newest_state(tmp_path, refuse)
    assert state is not None
    joined = {name: tensor.read() for name, tensor in state.part("model").items()}
    weights, metadata = read_weights(tmp_path / "last.safetensors")
    folder, _ = read_weights(tmp_path / "checkpoints" / "step-00000001")
    assert metadata["step"] == "1"
    assert joined.keys() == weights.keys() == folder.keys() == WHOLE.keys()
    for name, tensor in WHOLE.items():
        assert torch.equal(joined[name], tensor) and torch.equal(weights[name], tensor)
        assert torch.equal(folder[name], tensor)
    manifest = json.loads(
        (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").read_text()
    )
    assert manifest["format"] == 2
    assert sorted(manifest["files"]) == [
        f"model-{rank:05d}.safetensors" for rank in range(ranks) if shards_of(rank, ranks)
    ]


def test_rows_are_read_from_the_files_that_have_them(tmp_path: Path) -> None:
    written(tmp_path, 4)
    state = newest_state(tmp_path, refuse)
    assert state is not None
    for start, length in itertools.product(range(6), range(7)):
        rows = state.part("model")["fc.weight"].narrow(start, min(length, 6 - start))
        assert torch.equal(rows, WHOLE["fc.weight"][start : start + length])


@pytest.mark.parametrize("lost", ["a file", "rows", "rows twice", "a number"])
def test_parts_that_are_no_whole_are_no_checkpoint(lost: str, tmp_path: Path) -> None:
    pieces = {rank: shards_of(rank, 2) for rank in range(2)}
    if lost == "rows":
        first = pieces[0]["fc.weight"]
        pieces[0]["fc.weight"] = first._replace(local=first.local[:-1])
    if lost == "rows twice":
        pieces[1]["fc.weight"] = pieces[0]["fc.weight"]
    if lost == "a number":
        pieces[1]["step"] = Shard(torch.ones(2, dtype=torch.int64), torch.Size([4]))
    if lost == "a file":
        del pieces[1]
    stems = {f"model-{rank:05d}": part for rank, part in pieces.items()}
    path = commit(
        tmp_path,
        State(Position(1, 0, 1), stems, {}),
        keep=2,
    )
    with pytest.raises(checkpoint.CheckpointError, match=r"model: row \d+ of"):
        checkpoint.load(path).part("model")


@pytest.mark.parametrize(
    "slices",
    ['{"b": [0, [2]]}', '{"a": [0, []]}', '{"a": [3, [4, 2]]}', '{"a": [-1, [9, 2]]}', "[", "1"],
)
def test_slices_that_make_no_sense_are_one_error(slices: str, tmp_path: Path) -> None:
    """Another program or an attacker may write them, with a valid seal."""
    draft = create_draft(tmp_path, 1)
    content = serialize({"a": torch.ones(3, 2)}, {"slices": slices})
    size, sha256 = write_synced(draft / "model-00000.safetensors", content, "save")
    state = State(Position(1, 0, 1), {}, {})
    path = checkpoint.seal(
        draft, state, {"model-00000.safetensors": File(size=size, sha256=sha256)}, lambda: None
    )
    with pytest.raises(checkpoint.CheckpointError, match=r"model-00000\.safetensors") as caught:
        checkpoint.load(path)
    assert "\n" not in str(caught.value)


def test_weights_alone_leave_no_checkpoint(tmp_path: Path) -> None:
    written(tmp_path, 2, sealed=False)
    assert names(tmp_path) == []
    assert torch.equal(
        read_weights(tmp_path / "last.safetensors")[0]["fc.weight"], WHOLE["fc.weight"]
    )


def test_a_disk_that_is_full_for_one_rank_costs_the_checkpoint_and_not_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 2, step=1)
    before = (tmp_path / "last.safetensors").read_bytes()
    real = saver.write_files

    def full(draft: Path, state: State) -> dict[str, checkpoint.File]:
        if "model-00001" in state.shards:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(draft, state)

    monkeypatch.setattr(saver, "write_files", full)
    draft = create_draft(tmp_path, 2)
    first, second = (saving(draft, rank, 2, step=2) for rank in range(2))
    second.wait()
    assert isinstance(second.error, DiskFullError) and first.error is None, "rank 0 waits for it"
    first.leave(patience=0.0)
    first.remove_draft()
    assert isinstance(first.error, PeerError)
    assert names(tmp_path) == ["step-00000001"]
    assert (tmp_path / "last.safetensors").read_bytes() == before


def test_a_rank_that_never_writes_is_waited_for_so_long(tmp_path: Path) -> None:
    alone = saving(create_draft(tmp_path, 1), 0, 2, timeout=0.2)
    alone.wait()
    alone.remove_draft()
    assert isinstance(alone.error, PeerError)
    assert "rank 1" in str(alone.error)
    assert names(tmp_path) == []


def test_a_file_that_this_machine_reads_differently_is_not_sealed(tmp_path: Path) -> None:
    draft = create_draft(tmp_path, 1)
    saving(draft, 1, 2).wait()
    with (draft / "model-00001.safetensors").open("ab") as file:
        file.write(b"more")
    first = saving(draft, 0, 2)
    first.wait()
    first.remove_draft()
    assert isinstance(first.error, SetupError)
    assert "rank 1" in str(first.error)
    assert names(tmp_path) == []


def test_training_goes_on_while_a_save_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved values are those at the time of the request."""
    real = saver.write_files
    go = threading.Event()
    monkeypatch.setattr(
        saver,
        "write_files",
        lambda *words: go.wait(20) and real(*words),
    )
    alone = Saver(0, 20.0)
    weight = torch.ones(3)
    copy = alone.to_host("model", "w", weight)
    state = State(
        Position(1, 0, 1),
        whole({"model": {"w": copy}}),
        {},
    )
    save = Save(
        tmp_path,
        create_draft(tmp_path, 1),
        True,
        state,
        frozenset(),
        {},
        "model",
        2,
        lambda: None,
        0,
        lambda manifest: None,
    )
    alone.start(save, time.perf_counter())
    weight.zero_()
    assert [name for name in names(tmp_path) if ".tmp-" not in name] == [] and not alone.costs
    go.set()
    alone.wait()
    actual = newest_state(tmp_path, refuse)
    assert actual is not None
    assert torch.equal(actual.tensors("model")["w"], torch.ones(3))
    assert len(alone.costs) == 1


def test_a_file_verified_by_this_process_is_not_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    real = checkpoint._check_files
    monkeypatch.setattr(
        checkpoint, "_check_files", lambda path, files: (hashed.append(path), real(path, files))
    )
    for step in range(1, 6):
        commit(
            tmp_path,
            State(Position(step, 0, step), whole({"model": WHOLE}), {}),
            keep=2,
        )
    assert len(hashed) == 5 and all(".tmp-" in path.name for path in hashed), (
        "each once, before it has its name"
    )
    kept = [path for path in checkpoint._verified if path.is_relative_to(tmp_path)]
    assert len(kept) == 2, "nothing is remembered of those that are gone"
    path = tmp_path / "checkpoints" / "step-00000005" / "model.safetensors"
    data = path.read_bytes()
    at = path.stat()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
    with pytest.raises(checkpoint.CheckpointError, match="SHA-256"):
        checkpoint.load(path.parent)


# Kills


@pytest.fixture(scope="module")
def struck(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run this file as a script, so that torch is imported once for all ranks that are killed."""
    rounds = 1000 if request.config.getoption("--all") else 20
    command = [sys.executable, __file__, str(tmp_path_factory.mktemp("struck")), str(rounds)]
    completed = warm.run(
        command,
        capture_output=True,
        text=True,
        timeout=1800,
        env=environment(),
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    return {**json.loads(completed.stdout), "rounds": rounds}


@pytest.mark.slow
def test_whatever_rank_is_killed_or_has_a_full_disk_nothing_is_lost(struck: Any) -> None:
    assert struck["kills"] + struck["full"] == struck["rounds"]
    assert struck["kills"] > struck["rounds"] / 3 and struck["full"] > struck["rounds"] / 10
    assert struck["commits"] > struck["rounds"] / 20, "some strikes come too late"
    assert struck["left"] == 2, "drafts are gone with the next save"


def rank_of(
    folder: Path,
    rank: int,
    ranks: int,
    step: int,
    draft: Path,
    fault: str,
) -> int:
    """A rank that saves a step, in a process of its own; its exit code."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.environ.update(RANK=str(rank), TRAINER_FAULT=fault)
        faults.is_active = bool(fault)
        each = saving(draft, rank, ranks, step, added=step, timeout=0.3)
        each.wait()
        code = 0 if each.error is None else 28 if isinstance(each.error, DiskFullError) else 7
    finally:
        os._exit(code)


def strike(
    folder: Path,
    step: int,
    dice: random.Random,
    known: int,
    counts: dict[str, int],
) -> int:
    """Save `step` on some ranks while one is killed or has a full disk; the newest step that loads
    afterwards.
    """
    ranks = dice.choice((1, 2, 4))
    draft = create_draft(folder, step)
    victim = dice.randrange(ranks)
    kind = dice.choice(("kill", "kill", "full", "later"))
    point = dice.choice(
        ("tmp", "write", "fsync", "rename", "prune") if victim == 0 else ("tmp", "write", "fsync")
    )
    fault = "" if kind == "later" else f"{kind}@save#{victim}:{point}"
    pids = [rank_of(folder, rank, ranks, step, draft, fault) for rank in range(ranks)]
    if kind == "later":
        time.sleep(dice.uniform(0, 0.03))
        os.kill(pids[victim], signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    counts["full" if kind == "full" else "kills"] += 1
    state = newest_state(folder, refuse)  # A state with the name of a checkpoint is complete.
    loaded = state.position.step if state else 0
    assert loaded in (known, step), (known, step, loaded)
    assert loaded == step or any(codes), "all ranks had saved it"
    if state is not None:
        expected = {name: tensor + loaded for name, tensor in WHOLE.items()}
        part = state.part("model")
        assert part.keys() == expected.keys()
        assert all(torch.equal(part[k].read(), v) for k, v in expected.items())
    # Weights come before the seal: of this step, or of one that was sealed.
    if (folder / "last.safetensors").exists():
        weights, metadata = read_weights(folder / "last.safetensors")
        of = int(metadata["step"])
        assert loaded <= of <= step
        assert all(torch.equal(weights[k], WHOLE[k] + of) for k in WHOLE)
    counts["commits"] += loaded == step
    return loaded


def main(folder: Path, rounds: int) -> None:
    dice = random.Random(3)
    known_names = 0
    counts = {"kills": 0, "full": 0, "commits": 0}
    for step in range(1, rounds + 1):
        known_names = strike(folder, step, dice, known_names, counts)
    for step in (rounds + 1, rounds + 2):
        written(folder, 2, step)
    print(json.dumps({**counts, "left": len(names(folder))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

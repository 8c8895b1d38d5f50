"""A checkpoint on every rank, for machines with and without access to the run folder."""

from __future__ import annotations

import os
import shutil
import threading

import pytest

from tests.saving.states import commit, flip, make, refuse, same
from tests.strategies import on_ranks
from trainer.errors import CheckpointError
from trainer.saving.checkpoint import fingerprint, load_newest, read_manifest
from trainer.training import resuming
from trainer.training.resuming import check_here, on_every_rank


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(resuming, "CHUNK", 100)  # files of some pieces, the last one not full
    commit(tmp_path, make(7), keep=2)
    return tmp_path


here = threading.local()


def everywhere(home):
    """Return what each rank gets, and the number of tensors that were sent."""

    def work(world):
        here.rank = world.rank
        return on_every_rank(
            load_newest(home, refuse) if world.is_main else None, world
        ), world.sent

    return on_ranks(3, work)


def test_no_checkpoint_is_none_everywhere(tmp_path):
    assert everywhere(tmp_path) == [(None, 0)] * 3
    assert on_ranks(1, lambda world: on_every_rank(None, world)) == [None]


@pytest.mark.parametrize("blind", [[], [1], [2], [1, 2]])
def test_ranks_read_it_where_it_is_and_are_sent_it_where_they_do_not_find_it(
    blind, home, monkeypatch
):
    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(
        resuming, "check_here", lambda *words: None if here.rank in blind else check_here(*words)
    )
    actual = everywhere(home)
    assert all(bool(sent) == bool(blind) for _, sent in actual)
    shutil.rmtree(home / "checkpoints")
    assert all(same(state, make(7)) for state, _ in actual), "also when the folder is gone"
    actual.clear()
    assert len(os.listdir("/proc/self/fd")) == files


def test_only_the_very_same_checkpoint_counts(home):
    path = home / "checkpoints" / "step-00000007"
    raw = read_manifest(path)
    files = fingerprint(path)
    assert same(check_here(path, raw, files), make(7))
    assert check_here(home / "elsewhere", raw, files) is None
    copy = shutil.copytree(path, home / "theirs" / path.name)
    assert same(check_here(copy, raw, files), make(7)), "a whole copy on another machine"
    state = make(7)
    state.facts["run_id"] = "another"
    (home / "other").mkdir()
    assert check_here(commit(home / "other", state, keep=2), raw, files) is None, (
        "a run of the same name elsewhere"
    )
    for damaged in (path, copy):
        flip(damaged / "model.safetensors", -1)
        assert check_here(damaged, raw, files) is None, "damaged on this machine"


def test_a_file_that_changes_while_it_is_sent(home, monkeypatch):
    monkeypatch.setattr(resuming, "check_here", lambda *words: None)

    def work(world):
        actual = load_newest(home, refuse) if world.is_main else None
        if world.is_main:
            flip(home / "checkpoints" / "step-00000007" / "model.safetensors", -1)
        with pytest.raises(CheckpointError, match=r"model\.safetensors .*changed"):
            on_every_rank(actual, world)
        return True

    assert all(on_ranks(2, work))

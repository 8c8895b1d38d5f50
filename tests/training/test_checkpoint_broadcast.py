"""One checkpoint on every rank, on machines that see the run folder and on such that do not."""

from __future__ import annotations

import os
import shutil
import threading

import pytest

from tests.saving.states import flip, make, refuse, same
from tests.worlds import on_ranks
from trainer.errors import CheckpointError
from trainer.saving.checkpoint import commit, fingerprint, manifest_bytes, newest
from trainer.training import resuming
from trainer.training.resuming import found_here, on_every_rank


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(resuming, "CHUNK", 100)  # files of some pieces, the last one not full
    commit(tmp_path, make(7), keep=2)
    return tmp_path


here = threading.local()


def everywhere(home):
    """What each rank gets, and how many pieces were sent."""

    def work(world):
        here.rank = world.rank
        return on_every_rank(newest(home, refuse) if world.is_main else None, world), world.sent

    return on_ranks(3, work)


def test_no_checkpoint_is_none_everywhere(tmp_path):
    assert everywhere(tmp_path) == [(None, 0)] * 3
    assert on_ranks(1, lambda world: on_every_rank(None, world)) == [None]


@pytest.mark.parametrize("blind", [[], [1], [2], [1, 2]])
def test_ranks_read_it_where_it_is_and_are_sent_it_where_they_do_not_find_it(blind, home, monkeypatch):
    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(resuming, "found_here", lambda *words: None if here.rank in blind else found_here(*words))
    found = everywhere(home)
    assert all(bool(sent) == bool(blind) for _, sent in found)
    shutil.rmtree(home / "checkpoints")
    assert all(same(state, make(7)) for state, _ in found), "also when the folder is gone"
    found.clear()
    assert len(os.listdir("/proc/self/fd")) == files


def test_only_the_very_same_checkpoint_counts(home):
    path = home / "checkpoints" / "step-00000007"
    raw = manifest_bytes(path)
    files = fingerprint(path)
    assert same(found_here(path, raw, files), make(7))
    assert found_here(home / "elsewhere", raw, files) is None
    copy = shutil.copytree(path, home / "theirs" / path.name)
    assert same(found_here(copy, raw, files), make(7)), "a whole copy on another machine"
    state = make(7)
    state.facts["run_id"] = "another"
    (home / "other").mkdir()
    assert found_here(commit(home / "other", state, keep=2), raw, files) is None, "a run of the same name elsewhere"
    for damaged in (path, copy):
        flip(damaged / "model.safetensors", -1)
        assert found_here(damaged, raw, files) is None, "damaged on this machine"


def test_a_file_that_changes_while_it_is_sent(home, monkeypatch):
    monkeypatch.setattr(resuming, "found_here", lambda *words: None)

    def work(world):
        found = newest(home, refuse) if world.is_main else None
        if world.is_main:
            flip(home / "checkpoints" / "step-00000007" / "model.safetensors", -1)
        with pytest.raises(CheckpointError, match=r"model\.safetensors .*changed"):
            on_every_rank(found, world)
        return True

    assert all(on_ranks(2, work))

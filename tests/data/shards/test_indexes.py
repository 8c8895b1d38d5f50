"""An index is made once, and again where it does not fit."""

import os
import random
import sys
import threading

import numpy as np
import pytest

from tests import warm
from tests.command_line import environment
from tests.data.shards.making import tarred, with_classes
from trainer.data.shards import tars
from trainer.data.shards.indexes import ARRAYS, ShardFile, kept, path_of, read


@pytest.fixture
def shard(tmp_path):
    return ShardFile.of(tarred(tmp_path / "a.tar", [*with_classes([0, 1, 2]), ("x.cls", b"1"), ("y.txt", b"")]))


def made(shard, how="here"):
    """The index, and whether it was made now."""
    calls = []
    index = kept(shard, how, lambda one: calls.append(one) or tars.look(one))
    return index, bool(calls)


def same(one, other):
    return one.contents == other.contents and all(
        np.array_equal(getattr(one, key), getattr(other, key)) for key in ARRAYS
    )


def test_it_is_kept_as_it_is(shard, kept):
    first, new = made(shard)
    again, anew = made(shard)
    assert new and not anew and same(first, again)
    assert again.contents.wrong == {"a class and no image": (1, "x")} and again.contents.left == {".txt": 1}
    assert [path.name for path in kept.iterdir()] == [path_of(shard).name]


def test_of_a_shard_that_has_changed_it_is_made_anew(shard):
    made(shard)
    os.utime(shard.path, ns=(1, 1))
    changed = ShardFile.of(os.fsdecode(shard.path))
    assert made(changed)[1] and not made(changed)[1]
    assert made(changed, how="otherwise")[1]


def test_a_damaged_one_is_made_anew(shard):
    first, _ = made(shard)
    path, draw = path_of(shard), random.Random(0)
    whole = path.read_bytes()
    for number in range(120):
        damaged = bytearray(whole)
        if number % 3 == 0:
            del damaged[draw.randrange(len(damaged)) :]
        else:
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        assert same(made(shard)[0], first), number
    path.write_bytes(b"")
    assert made(shard)[1] and not made(shard)[1]


def test_a_folder_that_cannot_be_written(shard, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAINER_DATA", str(tmp_path / "file"))
    assert len(made(shard)[0]) == 3


def test_two_at_once(shard, kept):
    first, found = tars.look(shard), []
    threads = [threading.Thread(target=lambda: found.append(made(shard)[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(same(one, first) for one in found)
    assert {path.suffix for path in kept.iterdir()} <= {".npz"}


def test_who_is_killed_while_writing_leaves_nothing_to_clean_up(shard, kept):
    """Killed at each of the moments: the draft made, half written, whole."""
    code = """
import os, sys, numpy as np
from trainer.data.shards import tars, indexes
from trainer.data.shards.indexes import ShardFile
moment = sys.argv[2]
savez = np.savez
def die(file, **arrays):
    if moment == "whole":
        savez(file, **arrays)
    if moment == "half":
        file.write(b"PK" * 100); file.flush()
    os.kill(os.getpid(), 9)
np.savez = die
tars.index(ShardFile.of(sys.argv[1]))
"""
    for moment in ("made", "half", "whole"):
        command = [sys.executable, "-c", code, os.fsdecode(shard.path), moment]
        done = warm.run(command, env=environment(TRAINER_DATA=str(kept.parent)), capture_output=True)
        assert done.returncode == -9, done.stderr
        assert read(path_of(shard), {}) is None
    assert made(shard)[1]
    assert [path.suffix for path in kept.iterdir()] == [".npz"]

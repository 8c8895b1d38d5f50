"""An index is made once, and again where it does not fit; a shard is opened when it is read, and is what it was."""

import os
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.data.archives.making import tarred, with_classes
from trainer.data.archives import tars
from trainer.data.archives.indexes import ARRAYS, OPEN, Archive, kept, opened, path_of


@pytest.fixture
def shard(tmp_path):
    return Archive.of(tarred(tmp_path / "a.tar", [*with_classes([0, 1, 2]), ("y.txt", b"")]))


def made(shard, how="here"):
    """The index, and whether it was made now."""
    calls = []
    index = kept(shard, how, lambda one: calls.append(one) or tars.look(one))
    return index, bool(calls)


def same(one, other):
    facts = [{key: value for key, value in vars(each).items() if key not in ARRAYS} for each in (one, other)]
    return facts[0] == facts[1] and all(np.array_equal(getattr(one, key), getattr(other, key)) for key in ARRAYS)


def test_it_is_kept_as_it_is_and_made_anew_of_a_shard_that_has_changed(shard):
    first, new = made(shard)
    again, anew = made(shard)
    assert new and not anew and same(first, again)
    assert again.texts == ["0", "1", "2"] and again.left == {"other file(s) (.txt)": 1}
    assert [path.name for path in path_of(shard).parent.iterdir()] == [path_of(shard).name]
    os.utime(shard.path, ns=(1, 1))
    changed = Archive.of(os.fsdecode(shard.path))
    assert made(changed)[1] and not made(changed)[1]
    assert made(changed, how="otherwise")[1]


def test_a_damaged_one_is_made_anew(shard):
    first, _ = made(shard)
    path, draw = path_of(shard), random.Random(0)
    whole = path.read_bytes()
    for number in range(60):
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


def test_the_draft_of_one_who_was_killed_is_overwritten(shard):
    draft = path_of(shard).with_suffix(".part")
    draft.parent.mkdir(parents=True)
    draft.write_bytes(b"PK" * 10**6)
    assert made(shard)[1] and not made(shard)[1]
    assert [path.suffix for path in draft.parent.iterdir()] == [".npz"]


def shards(tmp_path, count):
    for n in range(count):
        (tmp_path / str(n)).write_bytes(b"%04d" % n * 100)
    return [Archive.of(tmp_path / str(n)) for n in range(count)]


def test_some_are_open_at_a_time_and_what_a_thread_reads_stays_so(tmp_path):
    opened.cache_clear()
    before, files, wrong = len(os.listdir("/proc/self/fd")), shards(tmp_path, OPEN * 3), []

    def read(start):
        for n in range(2000):
            number = (31 * start + 7 * n) % len(files)
            if files[number].read(0, 4).tobytes() != b"%04d" % number:
                wrong.append(number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(read, range(8)))
    assert not wrong and len(os.listdir("/proc/self/fd")) == before + OPEN
    opened.cache_clear()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_shard_that_was_exchanged_is_noticed(tmp_path):
    (shard,) = shards(tmp_path, 1)
    again = pickle.loads(pickle.dumps(shard))
    os.utime(tmp_path / "0", ns=(1, 1))
    with pytest.raises(OSError, match=r"0\b.* changed"):
        again.read(0, 4)
    os.utime(tmp_path / "0", ns=(1, shard.time))
    assert shard.read(0, 4).tobytes() == b"0000"
    with open(tmp_path / "0", "r+b") as file:
        file.truncate(100)
    with pytest.raises(OSError, match="was cut"):
        shard.read(90, 20)

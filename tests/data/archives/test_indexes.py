"""An index is built once, and again if it does not match.

A file is opened when it is read, and checked for changes.
"""

import os
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.data.archives.making import tarred, with_classes
from trainer.data.archives import tars
from trainer.data.archives.indexes import (
    ARRAYS,
    MAX_OPEN_SHARDS,
    Archive,
    index_path,
    load_or_make,
    open_shard,
)


@pytest.fixture
def shard(tmp_path):
    return Archive.of(tarred(tmp_path / "a.tar", [*with_classes([0, 1, 2]), ("y.txt", b"")]))


def made(shard, how="here"):
    """The index, and whether it was made now."""
    calls = []
    index = load_or_make(shard, how, lambda one: calls.append(one) or tars.read_index(one))
    return index, bool(calls)


def same(one, other):
    facts = [
        {key: value for key, value in vars(each).items() if key not in ARRAYS}
        for each in (one, other)
    ]
    return facts[0] == facts[1] and all(
        np.array_equal(getattr(one, key), getattr(other, key)) for key in ARRAYS
    )


def test_an_index_is_kept_and_rebuilt_only_for_a_changed_shard(shard):
    first, new = made(shard)
    again, anew = made(shard)
    assert new and not anew and same(first, again)
    assert again.texts == ["0", "1", "2"] and again.left == {"other file(s) (.txt)": 1}
    assert [path.name for path in index_path(shard).parent.iterdir()] == [index_path(shard).name]
    os.utime(shard.path, ns=(1, 1))
    changed = Archive.of(os.fsdecode(shard.path))
    assert made(changed)[1] and not made(changed)[1]
    assert made(changed, how="otherwise")[1]


def test_a_damaged_index_is_rebuilt(shard):
    first, _ = made(shard)
    path = index_path(shard)
    draw = random.Random(0)
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
    draft = index_path(shard).with_suffix(".part")
    draft.parent.mkdir(parents=True)
    draft.write_bytes(b"PK" * 10**6)
    assert made(shard)[1] and not made(shard)[1]
    assert [path.suffix for path in draft.parent.iterdir()] == [".npz"]


def shards(tmp_path, count):
    for n in range(count):
        (tmp_path / str(n)).write_bytes(b"%04d" % n * 100)
    return [Archive.of(tmp_path / str(n)) for n in range(count)]


def test_few_files_are_open_at_a_time_and_a_reading_thread_keeps_its_file(tmp_path):
    open_shard.cache_clear()
    before = len(os.listdir("/proc/self/fd"))
    files = shards(tmp_path, MAX_OPEN_SHARDS * 3)
    wrong = []

    def read(start):
        for n in range(2000):
            number = (31 * start + 7 * n) % len(files)
            if tars.encoded(files[number], 0, 4).tobytes() != b"%04d" % number:
                wrong.append(number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(read, range(8)))
    assert not wrong and len(os.listdir("/proc/self/fd")) == before + MAX_OPEN_SHARDS
    open_shard.cache_clear()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_shard_that_was_exchanged_is_noticed(tmp_path):
    (shard,) = shards(tmp_path, 1)
    again = pickle.loads(pickle.dumps(shard))
    os.utime(tmp_path / "0", ns=(1, 1))
    with pytest.raises(OSError, match=r"0\b.* changed"):
        tars.encoded(again, 0, 4)
    os.utime(tmp_path / "0", ns=(1, shard.time))
    assert tars.encoded(shard, 0, 4).tobytes() == b"0000"
    with open(tmp_path / "0", "r+b") as file:
        file.truncate(100)
    with pytest.raises(OSError, match="was truncated"):
        tars.encoded(shard, 90, 20)

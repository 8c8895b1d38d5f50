"""Shards are opened when they are read, some at a time, and are what they were."""

import os
import pickle
import threading

import pytest

from trainer.data.shards.indexes import OPEN, ShardFile, opened


@pytest.fixture(autouse=True)
def nothing_open():
    opened.cache_clear()
    yield
    opened.cache_clear()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def shards(tmp_path, count):
    for n in range(count):
        (tmp_path / str(n)).write_bytes(b"%04d" % n * 100)
    return [ShardFile.of(tmp_path / str(n)) for n in range(count)]


def test_no_more_than_some_are_open(tmp_path):
    before, files = descriptors(), shards(tmp_path, OPEN + 40)
    for n, shard in enumerate(files):
        assert shard.read(4, 4).tobytes() == b"%04d" % n
    assert descriptors() == before + OPEN
    opened.cache_clear()
    assert descriptors() == before


def test_what_is_crowded_out_while_a_thread_reads_it_stays_open(tmp_path):
    files, wrong = shards(tmp_path, OPEN * 3), []

    def read(start):
        for n in range(2000):
            number = (start + 7 * n) % len(files)
            if files[number].read(0, 4).tobytes() != b"%04d" % number:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(n * 31,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


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

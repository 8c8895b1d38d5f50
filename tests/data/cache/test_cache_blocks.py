"""A block returns the written photos or reports damage, for any change of the file."""

import os
import random

import numpy as np
import pytest

from trainer.data.cache import cache_blocks
from trainer.data.cache.cache_blocks import ENTRY, DamagedError, Prepared

KEY = bytes(range(16))


def photo(seed, rows=5, columns=7):
    pixels = np.random.default_rng(seed).integers(
        0,
        256,
        rows * columns * 3,
        np.uint8,
    )
    return Prepared(50 + seed, 70 + seed, rows, columns, pixels)


PHOTOS = [
    photo(0),
    None,
    photo(1, 1, 1),
    photo(2),
    None,
]


@pytest.fixture
def block(tmp_path):
    path = tmp_path / "a.block"
    with open(path, "w+b") as file:
        cache_blocks.write(file, KEY, PHOTOS, len(PHOTOS))
    return path


def same(one, other):
    if one is None or other is None:
        return one is other
    return one._replace(data=one.data.tolist()) == other._replace(data=other.data.tolist())


def test_written_blocks_are_read(block):
    assert all(
        same(cache_blocks.read(block, KEY, row), expected) for row, expected in enumerate(PHOTOS)
    )


@pytest.mark.slow(cases=["flip", "zeros", "longer"])
@pytest.mark.parametrize("way", ["flip", "cut", "zeros", "longer"])
def test_no_damage_gives_other_pixels(block, way, full):
    """A photo is right, or raises an error, or is reported as left out (its entry is all zeros) and
    then read again.
    """
    raw = block.read_bytes()
    drawn = random.Random(way)
    message = 0
    for _ in range(1000 if full else 200):
        spoiled = bytearray(raw)
        at = drawn.randrange(len(raw))
        if way == "flip":
            spoiled[at] ^= 1 << drawn.randrange(8)
        elif way == "cut":
            del spoiled[at:]
        elif way == "zeros":
            until = min(len(raw), at + drawn.randrange(1, 100))
            spoiled[at:until] = bytes(until - at)
        else:
            spoiled += os.urandom(drawn.randrange(1, 50))
        for row, expected in enumerate(PHOTOS):
            block.write_bytes(spoiled)  # a damaged block is removed
            try:
                actual = cache_blocks.read(block, KEY, row)
            except DamagedError:
                message += 1
                continue
            assert actual is None or same(actual, expected)
    assert message > 0 or way == "longer"


def test_a_length_that_is_nonsense_allocates_nothing(block):
    raw = np.frombuffer(bytearray(block.read_bytes()), np.uint8)
    raw[: ENTRY.itemsize].view(ENTRY)["bytes"] = 2**60
    block.write_bytes(raw.tobytes())
    with pytest.raises(DamagedError):
        cache_blocks.read(block, KEY, 0)


def test_a_block_is_on_disk_before_it_is_renamed(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        os,
        "fsync",
        lambda descriptor: synced.append(os.fstat(descriptor).st_size),
    )
    with open(tmp_path / "a", "w+b") as file:
        cache_blocks.write(file, KEY, PHOTOS, len(PHOTOS))
    assert synced == [(tmp_path / "a").stat().st_size]


def test_another_block_under_this_name_and_an_entry_in_anothers_place_are_damage(block):
    raw = bytearray(block.read_bytes())
    size = ENTRY.itemsize
    for row in (0, 2, 3):
        block.write_bytes(raw)  # a damaged block is removed
        with pytest.raises(DamagedError):
            cache_blocks.read(block, b"x" * 16, row)
    raw[:size], raw[3 * size : 4 * size] = raw[3 * size : 4 * size], raw[:size]
    for row in (0, 3):
        block.write_bytes(raw)
        with pytest.raises(DamagedError):
            cache_blocks.read(block, KEY, row)

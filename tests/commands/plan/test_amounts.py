"""Amounts of memory and speeds, as people write and read them."""

import pytest

from trainer.telemetry import readable


@pytest.mark.parametrize(
    ("word", "expected"),
    [("24GiB", 24 * 2**30), ("24GB", 24e9), ("512mib", 2**29), ("1.5TB", 1.5e12), ("8 GiB", 2**33)],
)
def test_memory(word, expected):
    assert readable.parse_memory(word) == expected


@pytest.mark.parametrize(
    ("word", "expected"), [("10GB/s", 1e10), ("1GiB/s", 2**30), ("100Gbit/s", 12.5e9), ("25gb/s", 25e9)]
)
def test_bandwidth(word, expected):
    assert readable.parse_bandwidth(word) == expected


def test_shown():
    assert [readable.operations(n) for n in (8.178e9, 12)] == ["8.18 GFLOP", "12 FLOP"]
    assert [readable.multiply_adds(n) for n in (8.178e9, 12)] == ["4.09 GMACs", "6 MACs"]

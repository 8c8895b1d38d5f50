"""Figures and tables as people read them."""

import pytest

from trainer.telemetry import readable


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1 KiB"),
        (5 * 2**20, "5 MiB"),
        (3 * 2**30, "3.00 GiB"),
    ],
)
def test_sizes(count, text):
    assert readable.format_size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0125, "12.5 ms"),
        (2, "2.00 s"),
        (12.34, "12.3 s"),
        (119, "119 s"),
        (150, "2 min"),
        (7_200, "2 h"),
        (86_400 * 800, "2 y"),
    ],
)
def test_durations(seconds, text):
    assert readable.format_duration(seconds) == text


def test_a_table_is_as_wide_as_its_cells_and_leaves_empty_columns_out():
    rows = [
        ["name", "", "size"],
        ["a", "", "10"],
        ["longer", "", ""],
    ]
    assert readable.format_table(rows, right={2}) == ["name    size", "a         10", "longer"]


WIDE = [
    ["mode", "images/s", "note"],
    ["single", "1,234", "the reference, on all cores of this machine"],
    ["ddp", "987", "runs/a/long/path"],
]


@pytest.mark.parametrize(("columns", "height"), [(33, 4), (34, 3), (60, 2), (61, 1)])
def test_a_table_that_is_too_wide_keeps_all_of_its_text(columns, height, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    head, *rows = readable.format_table(WIDE, right={1})
    lines = [line for row in (head, *rows) for line in row.splitlines()]
    assert max(map(len, lines)) <= columns
    for row, cells in zip(rows, WIDE[1:], strict=True):
        assert all(set(cell.split()) <= {*row.split()} for cell in cells)
    assert len(rows[0].splitlines()) == height


MEMORY = {
    "24GiB": 24 * 2**30,
    "24GB": 24e9,
    "512mib": 2**29,
    "1.5TB": 1.5e12,
    "8 GiB": 2**33,
}
SPEEDS = {"10GB/s": 1e10, "1GiB/s": 2**30, "100Gbit/s": 12.5e9}


@pytest.mark.parametrize(("key", "amounts"), [("memory", MEMORY), ("bandwidth", SPEEDS)])
def test_amounts_of_memory_and_speeds(key, amounts):
    assert {word: readable.parse_amount(key, word) for word in amounts} == amounts

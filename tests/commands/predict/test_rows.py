"""Rows as they are written, and those of an earlier command that were damaged."""

from __future__ import annotations

import re

import pytest

from tests.pages import GUIDE
from trainer.commands.predict import sources
from trainer.commands.predict.labelling import Labels
from trainer.commands.predict.rows import COLUMNS, PartFile


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize(
    "damage", [b"\xff\xfe\x00\n", b"[" * 9999 + b"\n", b"x" * 2**21 + b"\n", b"5\n", b"null\n", b"\n"]
)
def test_rows_after_a_damaged_one_are_written_again(tmp_path, kind, damage):
    items = [sources.Item(f"{number}.png", None, None) for number in range(4)]
    rows = PartFile(tmp_path, 0, kind, ("a", "b"), {})
    for item in items:
        rows.write(item, Labels((1, 0), (0.75, 0.25)))
    rows.close()
    lines = rows.path.read_bytes().splitlines(keepends=True)
    rows.path.write_bytes(b"".join([*lines[:2], damage, lines[3]]))
    again = PartFile(tmp_path, 0, kind, ("a", "b"), {})
    assert again.done == 2 and [row["path"] for row in again.read()] == ["0.png", "1.png"]
    for item in items[2:]:
        again.write(item, Labels((1, 0), (0.75, 0.25)))
    again.close()
    assert again.path.read_bytes() == b"".join(lines)


def test_a_row_is_what_the_guide_tells(tmp_path):
    rows = PartFile(tmp_path, 0, "jsonl", ("a", "b"), {})
    rows.write(sources.Item("0.png", None, 1), Labels((1, 0), (0.75, 0.25)))
    rows.write(sources.Item("1.png", None, None), Labels((), (), "odd"))
    rows.write(sources.Item("2.png", None, None), None, "died")
    rows.close()
    found = list(rows.read())
    assert [tuple(row) for row in found] == [COLUMNS] * 3 and found[0]["top5"] == [["b", 0.75], ["a", 0.25]]
    assert [row["error"] for row in found] == [None, "odd", "gave up: died"]
    assert rows.counts == {"images": 3, "unreadable": 1, "failed": 1, "labelled": 1, "right": 1}
    table = (GUIDE / "predict.md").read_text().partition("| column | what it holds |\n")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \| \w", table, re.M)) == COLUMNS

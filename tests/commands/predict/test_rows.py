"""Rows as they are written."""

from __future__ import annotations

import json
import re

from tests.pages import GUIDE
from trainer.commands.predict import sources
from trainer.commands.predict.labelling import Labels
from trainer.commands.predict.rows import COLUMNS, PartFile


def test_a_row_is_what_the_guide_tells(tmp_path):
    (tmp_path / "part-0000").mkdir()  # what has the name keeps what it holds
    rows = PartFile(tmp_path, 0, "jsonl", ("a", "b"))
    rows.write(sources.Item("0.png", None, 1), Labels((1, 0), (0.75, 0.25)))
    rows.write(sources.Item("1.png", None, None), Labels((), (), "odd"))
    rows.write(sources.Item("2.png", None, None), None, "died")
    rows.close()
    found = list(map(json.loads, rows.path.read_text().splitlines()))
    assert len([*tmp_path.iterdir()]) == 2 and [tuple(row) for row in found] == [COLUMNS] * 3
    assert found[0]["top5"] == [["b", 0.75], ["a", 0.25]]
    assert [row["error"] for row in found] == [None, "odd", "gave up: died"]
    assert rows.counts == {"images": 3, "unreadable": 1, "failed": 1, "labelled": 1, "right": 1}
    table = (GUIDE / "predict.md").read_text().partition("| column | what it holds |\n")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \| \w", table, re.M)) == COLUMNS

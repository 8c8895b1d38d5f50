"""Rows and notes of an earlier command that were damaged."""

from __future__ import annotations

import json

import pytest

from trainer.inference import sources
from trainer.inference.labelling import Labels
from trainer.inference.rows import PartFile, complete


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


@pytest.mark.parametrize("content", ["5", "[]", "{", '{"settings": 1}', '{"settings": {}}', "[" * 99_999])
def test_damaged_notes_begin_anew(tmp_path, content):
    (tmp_path / "predictions.csv").write_text("")
    (tmp_path / "predict.json").write_text(content)
    assert complete(tmp_path, tmp_path / "predictions.csv", {}) is None
    (tmp_path / "part-0000.json").write_text(content)
    (tmp_path / "part-0000").mkdir()
    if content != '{"settings": 1}' and content != '{"settings": {}}':
        rows = PartFile(tmp_path, 0, "csv", (), {"number": 3})
        rows.close()
        assert rows.done == 0 and json.loads((tmp_path / "part-0000.json").read_text()) == {"number": 3}

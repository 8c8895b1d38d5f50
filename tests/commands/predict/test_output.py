"""What an earlier command has left in the folder may be damaged."""

from __future__ import annotations

import json

import pytest

from trainer.commands.predict.rows import PartFile, complete


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

"""Files as they may be found, and names that are taken."""

import csv
import os
import subprocess
import sys

import pytest

from tests.command_line import environment
from trainer.saving import files


def test_only_files_up_to_the_limit_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert files.read(tmp_path / "file") == files.read(tmp_path / "file", 5) == b"12345"
    os.mkfifo(tmp_path / "pipe")
    for name, limit in (
        ("file", 4),
        ("pipe", 9),
        (".", 9),
        ("none", 9),
    ):
        with pytest.raises(OSError):
            files.read(tmp_path / name, limit)


@pytest.mark.parametrize("content", ["", "[", "5", "[]", "[" * 99_999, "\xff"])
def test_files_that_are_no_json_objects_are_skipped_with_a_message(tmp_path, content):
    path = tmp_path / "notes.json"
    messages = []
    assert files.read_json_or_empty(path, messages.append) == {} and not messages
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match="JSON"):
        files.read_json(path)
    assert files.read_json_or_empty(path, messages.append) == {}
    assert len(messages) == 1 and messages[0].startswith(f"{path} ") and "JSON" in messages[0]


def test_a_folder_in_the_way_keeps_what_it_holds(tmp_path):
    path = tmp_path / "result.json"
    path.mkdir()
    (path / "kept").touch()
    draft = files.temporary_path(path)
    draft.write_text("new")
    files.replace_file(draft, path)
    (aside,) = tmp_path.glob("aside-*")
    assert path.read_text() == "new"
    assert (aside / "kept").exists()
    assert not draft.exists()
    for each in (path, aside, path):  # a file, a folder, nothing
        files.remove(each)
    assert not list(tmp_path.iterdir())


def test_streams_that_were_closed_are_open():
    """The process is started by `<&- >&- 2>&-`: files that are opened next must not get these
    numbers.
    """
    script = (
        "import os, sys; from trainer.saving.files import open_streams; "
        "open_streams(); print(1, flush=True); "
    )
    script += "sys.exit(os.open(os.devnull, os.O_RDONLY) < 3)"
    words = ["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, script]
    assert subprocess.run(words, env=environment(), check=False).returncode == 0


def test_cells_of_a_table_come_back_whatever_they_hold(tmp_path):
    rows = [
        ("file", "label"),
        ("a\rb", "c\r\nd"),
        ("new\nline", '"'),
        ("a,b", ""),
        ("=1", "-x"),
        (" blank ", "\u2028"),
    ]
    path = tmp_path / "table.csv"
    files.write_atomically(path, files.format_csv(rows))
    with path.open(newline="") as file:
        assert [tuple(row) for row in csv.reader(file)] == rows
    assert files.format_csv([("a", 1), ("b", None)]) == "a,1\nb,\n"

"""Files as they may be found, and names that are taken."""

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
    for name, limit in (("file", 4), ("pipe", 9), (".", 9), ("none", 9)):
        with pytest.raises(OSError):
            files.read(tmp_path / name, limit)


@pytest.mark.parametrize("content", ["", "[", "5", "[]", "[" * 99_999, "\xff"])
def test_what_is_no_json_object_is_left_out_with_a_sentence(tmp_path, content):
    path, said = tmp_path / "notes.json", []
    assert files.usable_json(path, said.append) == {} and not said
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match="JSON"):
        files.read_json(path)
    assert files.usable_json(path, said.append) == {}
    assert len(said) == 1 and said[0].startswith(f"{path} ") and "JSON" in said[0]


def test_a_folder_in_the_way_keeps_what_it_holds(tmp_path):
    path = tmp_path / "result.json"
    path.mkdir()
    (path / "kept").touch()
    draft = files.draft_of(path)
    draft.write_text("new")
    files.put(draft, path)
    (aside,) = tmp_path.glob("aside-*")
    assert path.read_text() == "new" and (aside / "kept").exists() and not draft.exists()
    for each in (path, aside, path):  # a file, a folder, nothing
        files.remove(each)
    assert not list(tmp_path.iterdir())


def test_streams_that_were_closed_are_open():
    """Started by `<&- >&- 2>&-`: what is opened next must not take their numbers."""
    script = "import os, sys; from trainer.saving.files import open_streams; open_streams(); print(1, flush=True); "
    script += "sys.exit(os.open(os.devnull, os.O_RDONLY) < 3)"
    words = ["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, script]
    assert subprocess.run(words, env=environment(), check=False).returncode == 0

"""Folders, lists and pipes of images, as they may be found."""

from __future__ import annotations

import os
import subprocess

import pytest

from trainer.commands.predict import sources
from trainer.errors import RecipeError, SetupError


def test_a_single_file_and_its_folder(photos):
    one = photos / "1" / "03.png"
    assert list(sources.image_files(str(one), ["0", "1"]).items) == [sources.Item(str(one), str(one), 1)]
    assert [item.label for item in sources.image_files(str(photos / "odd"), ["0", "1"]).items] == [None] * 5


def test_lists_from_elsewhere(tmp_path, monkeypatch):
    """A byte order mark, Windows line ends, a name that is no UTF-8; and a name with a line end in it, continued."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").touch()
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbfa.png\r\nb\xe9.png\r\n")
    found = [item.path for item in sources.image_files(str(tmp_path / "list.txt"), []).items]
    assert found == ["a.png", os.fsdecode(b"b\xe9.png")]
    odd = sources.Inputs("odd", 2, iter([sources.Item(path, path, None) for path in ("a\nb.png", "c.png")]))
    rest = sources.skip(odd, iter(["a b.png"]), tmp_path)
    assert rest.count == 1 and next(rest.items).path == "c.png"


@pytest.mark.parametrize(
    ("name", "content", "first"),
    [("list.csv", b"file,label\na.png,cat\n", "file,label"), ("a.mp4", b"\x1cftyp", "ftyp")],
)
def test_what_is_no_list_of_images_is_told_at_once(tmp_path, monkeypatch, name, content, first):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").touch()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SetupError, match=rf"{name}.*{first}.*\bpath\b"):
        sources.image_files(name, [])


def test_a_pipe_is_a_list_of_paths_and_a_device_is_none(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"printf 'a/1.png\\nb/2.png\\n' > {pipe}"]):
        found = sources.image_files(str(pipe), ("b",))
    assert [(item.path, item.label) for item in found.items] == [("a/1.png", None), ("b/2.png", 0)]
    with pytest.raises(RecipeError, match="ranks"):
        sources.image_files(str(pipe), (), 0, 2)
    with pytest.raises(SetupError, match="is a device"):
        sources.image_files("/dev/zero", ())
    for odd in (b"\0" * 9, b"x" * 2**20):
        (tmp_path / "list").write_bytes(b"a.png\n" + odd)
        with pytest.raises(SetupError, match=r"line 2 "):
            sources.image_files(str(tmp_path / "list"), ())

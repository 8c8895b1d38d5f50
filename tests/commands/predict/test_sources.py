"""Folders and lists of images, as they may be found."""

import errno
import os
import re

import pytest

from trainer.commands.predict import sources
from trainer.errors import RecipeError, SetupError


def test_files_folders_and_lists_in_the_order_given(photos, tmp_path, monkeypatch):
    """A list from elsewhere too: a byte order mark, Windows line ends, a name that is no UTF-8."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").touch()
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbfa.png\r\n\r\nb\xe9.png\r\n")
    one = str(photos / "1" / "03.png")
    actual = sources.find_images([one, str(photos / "odd"), "list.txt"])
    paths = [item.path for item in actual.items]
    assert actual.count == len(paths) == 1 + 5 + 2
    assert [os.path.basename(path) for path in paths[:2]] == ["03.png", "cmyk.jpg"]
    assert paths[-2:] == ["a.png", os.fsdecode(b"b\xe9.png")]
    [ignored] = actual.ignored
    assert re.search(r"\b1 other file \(\.md\)", ignored)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("list.csv", b"file,label\na.png,cat\n", "file,label"),
        ("a.mp4", b"\x1cftyp\0", "ftyp"),
        ("empty", None, "no images"),
        ("nowhere", b"", os.strerror(errno.ENOENT)),
        ("/dev/zero", b"", r"\(.*\bfile\)"),
    ],
)
def test_inputs_that_are_no_list_of_images_are_refused_at_once(
    tmp_path, monkeypatch, name, content, says
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").touch()
    if content is None:
        (tmp_path / name).mkdir()
    elif content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SetupError, match=rf"^data\.root={name} .*{says}.*\bJPEG, PNG, WebP\b"):
        sources.find_images([name])


def test_standard_input_is_read_alone():
    with pytest.raises(RecipeError, match="standard input"):
        sources.find_images(["-", "photos"])

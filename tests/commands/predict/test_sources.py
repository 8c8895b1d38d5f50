"""Folders, lists and pipes of images, as they may be found."""

from __future__ import annotations

import io
import os
import re
import subprocess
import unicodedata
from pathlib import Path

import pytest

from trainer.commands.predict import sources
from trainer.errors import RecipeError, SetupError


def test_a_single_file_and_its_folder(photos):
    one = photos / "1" / "03.png"
    assert list(sources.image_files(str(one), ["0", "1"]).items) == [sources.Item(str(one), str(one), 1)]
    assert [item.label for item in sources.image_files(str(photos / "odd"), ["0", "1"]).items] == [None] * 5


KINDS = ("animal", "ship")


def labels(given, classes=KINDS):
    """The label of each image, by its path below the working folder, and what is told of them."""
    found = sources.image_files([str(each) for each in given], classes)
    return {os.path.relpath(item.path): item.label for item in found.items}, found.unlabelled


@pytest.fixture
def nested(tmp_path, monkeypatch):
    """A data set whose classes have folders in them, one of which is called like another class."""
    monkeypatch.chdir(tmp_path)
    for name in ("animal/indoor/1.png", "animal/ship/2.png", "animal/3.png", "ship/harbour/4.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).touch()
    return {"animal/indoor/1.png": 0, "animal/ship/2.png": 0, "animal/3.png": 0, "ship/harbour/4.png": 1}


@pytest.mark.parametrize("way", ["folder", "above", "dot", "files", "list", "classes"])
def test_labels_are_the_outermost_folders(nested, monkeypatch, way):
    paths = [f"photos/{name}" for name in nested]
    Path("list.txt").write_text("\n".join(paths))
    wanted = {f"photos/{name}": label for name, label in nested.items()}
    if way == "dot":
        monkeypatch.chdir("photos")
        wanted = nested
    given = {"folder": ["photos"], "above": ["../" + os.path.basename(os.getcwd())], "dot": ["."], "files": paths}
    assert labels(given.get(way) or ["list.txt" if way == "list" else "photos"])[0] == wanted


@pytest.mark.parametrize("part", ["train", "Val"])
def test_folders_of_parts_lie_above_labels_also_where_a_class_is_called_so(tmp_path, monkeypatch, part):
    monkeypatch.chdir(tmp_path)
    for name in ("ship", "train"):
        Path(f"set/{part}/{name}/old").mkdir(parents=True)
        Path(f"set/{part}/{name}/old/1.png").touch()
    found, told = labels(["set"], ("ship", "train"))
    assert {name.split("/")[2]: label for name, label in found.items()} == {"ship": 0, "train": 1} and not told
    Path(f"set/{part}").rename("vehicles")
    assert sorted(labels(["vehicles"], ("ship", "train"))[0].values()) == [0, 1]


def test_a_folder_that_is_a_class(nested):
    assert labels(["photos/ship"]) == ({"photos/ship/harbour/4.png": 1}, "")
    assert labels(["photos/ship/harbour/4.png"], (*KINDS, "harbour"))[0] == {"photos/ship/harbour/4.png": None}


@pytest.mark.parametrize("way", ["stdin", "alone"])
def test_of_a_path_alone_the_only_folder_that_is_a_class_counts(nested, monkeypatch, way):
    wanted = dict(zip((f"photos/{name}" for name in nested), (0, None, 0, 1), strict=True))
    if way == "stdin":
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(wanted)))
        found = labels(["-"])[0]
    else:
        found = {path: label for each in wanted for path, label in labels([each])[0].items()}
    assert found == wanted


@pytest.mark.parametrize("root", ["photos/animal", "photos/animal/ship", "photos/animal/ship/2.png"])
def test_of_two_classes_in_one_another_none_is_guessed(nested, root):
    found, told = labels([root])
    assert set(found.values()) == {None} and re.search(r"\banimal and ship\b", told)
    assert None not in labels(["photos"])[0].values() and not labels(["photos"])[1]


def test_a_folder_that_is_no_class_is_told_and_its_folders_are_none(nested):
    Path("photos/other/ship").mkdir(parents=True)
    Path("photos/other/ship/5.png").touch()
    found, told = labels(["photos"])
    assert found["photos/other/ship/5.png"] is None and sum(label is not None for label in found.values()) == 4
    assert re.search(r"\b1 image\b.*\bother\b", told)


def test_a_class_is_known_in_both_forms_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for form in ("NFC", "NFD"):
        folder = Path(form, unicodedata.normalize(form, "école"))
        folder.mkdir(parents=True)
        (folder / "1.png").touch()
        for known in ("NFC", "NFD"):
            found, _ = labels([form], ("a", unicodedata.normalize(known, "école")))
            assert found == {f"{folder}/1.png": 1}, "a path stays as it is on disk"


def test_lists_from_elsewhere(tmp_path, monkeypatch):
    """A byte order mark, Windows line ends, a name that is no UTF-8."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").touch()
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbfa.png\r\nb\xe9.png\r\n")
    found = [item.path for item in sources.image_files(str(tmp_path / "list.txt"), []).items]
    assert found == ["a.png", os.fsdecode(b"b\xe9.png")]


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

"""Files among the photos that are no photos are skipped, counted, and reported in one line."""

import errno
import os
import re

import pytest

from tests.data.photo_folders import opened, photo, photo_set
from trainer.commands.predict.sources import find_images
from trainer.data import damaged, open_datasets
from trainer.data.damaged import find_damaged
from trainer.data.folders import scanning
from trainer.data.folders.scanning import LeftOut, images_below, listed
from trainer.distributed.world_setup import create_world
from trainer.errors import SetupError
from trainer.recipe import load


@pytest.fixture
def root(tmp_path):
    return photo_set(tmp_path / "pets", {"cat": 4, "dog": 4}, split=True)


def clutter(root):
    """Add the files that phones, systems and people leave among photos."""
    cats = root / "train" / "cat"
    for number in range(3):
        (cats / f"IMG_{number}.HEIC").write_bytes(b"a photo")
    for name in ("._0.jpg", ".DS_Store", "Thumbs.db", "Desktop.INI"):
        (cats / name).write_bytes(b"junk")
    (root / "train" / "__MACOSX" / "cat").mkdir(parents=True)
    (root / "train" / "__MACOSX" / "cat" / "._0.jpg").write_bytes(b"junk")
    (cats / "notes.txt").write_text("no image")
    photo(root / "train" / "loose.jpg")
    return root


def test_each_kind_is_counted_by_its_reason(root, monkeypatch):
    monkeypatch.setattr(scanning, "readable_suffixes", lambda: frozenset({".jpg"}))
    whole = opened(root)
    counted = opened(clutter(root))
    assert len(counted.train) == len(whole.train) == 8 and "ignored" not in whole.notes
    heic = f"3 .HEIC files: {scanning.register_heif()}"
    loose = f"1 {scanning.LOOSE.replace('(s)', '')}"
    kinds = {heic, loose, "5 hidden files"}
    assert {*counted.notes["ignored"].split("; ")} == {*kinds, "1 other file (.txt)"}
    inputs = find_images([str(root / "train" / "cat")])
    [ignored] = inputs.ignored
    assert inputs.count == 4 and "3 .HEIC " in ignored and "4 hidden " in ignored
    with pytest.raises(SetupError, match=r"IMG_0\.HEIC .*\bpip install\b.*\bpillow-heif\b"):
        find_images([str(root / "train" / "cat" / "IMG_0.HEIC")])


@pytest.mark.parametrize("kind", ["empty", "lost", "circle"])
def test_an_empty_file_and_a_link_to_nothing_are_damaged_photos(root, kind):
    """A disk that is not mounted causes both.

    They are named, and skipped only if the user asks for it.
    """
    path = root / "train" / "cat" / "0.jpg"
    path.unlink()
    path.touch() if kind == "empty" else path.symlink_to(
        "0.jpg" if kind == "circle" else "nowhere.jpg"
    )
    words = ["data.name=imagefolder", f"data.root={root}", "data.image_size=8"]
    # Photos in memory, and photos that are read when they are needed.
    for crop in ("none", "resized"):
        recipe = load(None, *words, f"augment.crop={crop}")
        with pytest.raises(SetupError, match=r"train/cat/0\.jpg .*data\.on_error=skip"):
            find_damaged(open_datasets(recipe), recipe, create_world(recipe))
    assert damaged.is_complete(bytes(path)) is False


def test_links_between_folders_are_followed_once(tmp_path):
    root = photo_set(tmp_path / "pets", {"cat": 1, "dog": 1})
    for link, target in {
        "cat/x": "../dog",
        "dog/y": "../cat",
        "dog/z": "..",
        "dog/self": "self",
    }.items():
        (root / link).symlink_to(target)
    (tmp_path / "linked").symlink_to(root)
    for place in (root, tmp_path / "linked"):
        actual = list(images_below(str(place), LeftOut()))
        assert actual == ["cat/0.jpg", "cat/x/0.jpg", "dog/0.jpg", "dog/y/0.jpg"]


def test_names_that_are_no_text_are_written_as_text(tmp_path):
    for name in ("caf\udce9/\udce8.jpg", "caf\udce9/2.jpg", "dog/1.jpg", "dog/2.jpg"):
        photo(tmp_path / name)
    datasets = opened(tmp_path)
    assert datasets.classes == ("caf\\xe9", "dog") and datasets.notes["classes"].isascii()
    assert datasets.holdout_table().encode()
    assert {len(datasets.train), len(datasets.val)} == {2}
    image, _ = datasets.train.read(0, 3)
    assert image.shape == (3, 30, 40)
    assert find_images([str(tmp_path / "caf\udce9")]).count == 2


def test_images_come_in_order_below_a_name(tmp_path):
    for name in ("b/2.jpg", "a.jpg", "b/1.jpg", "c.jpg"):
        photo(tmp_path / name)
    assert list(images_below(str(tmp_path), LeftOut(), "x")) == [
        "x/a.jpg",
        "x/b/1.jpg",
        "x/b/2.jpg",
        "x/c.jpg",
    ]
    nowhere = tmp_path / "nowhere"
    message = f"^{re.escape(str(nowhere))} .*: {os.strerror(errno.ENOENT)}$"
    with pytest.raises(SetupError, match=message):
        listed(nowhere, LeftOut())

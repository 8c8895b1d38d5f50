"""What lies among photos and is none of them is left out, counted, and told in one line."""

import pytest

from tests.data.photo_folders import opened, photo, photo_set
from trainer.commands.predict.sources import image_files
from trainer.data.folders import scanning
from trainer.data.folders.scanning import LeftOut, images_below, listed
from trainer.errors import SetupError


@pytest.fixture
def root(tmp_path):
    return photo_set(tmp_path / "pets", {"cat": 4, "dog": 4}, split=True)


def clutter(root, unread=".heic"):
    """What phones, systems and people leave among photos."""
    cats = root / "train" / "cat"
    for number in range(3):
        (cats / f"IMG_{number}{unread.upper()}").write_bytes(b"a photo")
    for name in ("._0.jpg", ".DS_Store", "Thumbs.db", "Desktop.INI"):
        (cats / name).write_bytes(b"junk")
    (root / "train" / "__MACOSX" / "cat").mkdir(parents=True)
    (root / "train" / "__MACOSX" / "cat" / "._0.jpg").write_bytes(b"junk")
    (cats / "empty.jpg").touch()
    (cats / "gone.jpg").symlink_to("nowhere.jpg")
    (cats / "notes.txt").write_text("no image")
    (cats / "README").write_text("no image")
    photo(root / "train" / "loose.jpg")
    return root


def test_each_kind_is_counted_by_its_reason(root, monkeypatch):
    monkeypatch.setattr(scanning, "readable_suffixes", lambda: frozenset({".jpg"}))
    whole, counted = opened(root), opened(clutter(root))
    assert len(counted.train) == len(whole.train) == 8 and "ignored" not in whole.notes
    kinds = ["3 .HEIC", "1 image", "1 empty", "1 link", "5 hidden", "2 other"]
    assert [" ".join(kind.split()[:2]) for kind in counted.notes["ignored"].split("; ")] == kinds
    assert "pip install pillow-heif;" in counted.notes["ignored"] and "(.txt, " in counted.notes["ignored"]
    assert "(.DS_Store, ._0.jpg, Desktop.INI, Thumbs.db)" in counted.notes["ignored"]


def test_predict_counts_them_too_and_gives_an_empty_file_its_row(root, monkeypatch):
    monkeypatch.setattr(scanning, "readable_suffixes", lambda: frozenset({".jpg"}))
    inputs = image_files([str(clutter(root) / "train" / "cat")])
    assert inputs.count == 6 and any(item.path.endswith("empty.jpg") for item in inputs.items)
    [ignored] = inputs.ignored
    assert ignored.startswith("3 .HEIC ") and "pip install pillow-heif; 4 hidden " in ignored
    with pytest.raises(SetupError, match=r"IMG_0\.HEIC.*pip install pillow-heif"):
        image_files([str(root / "train" / "cat" / "IMG_0.HEIC")])


@pytest.mark.parametrize("target", ["nowhere.jpg", "gone.jpg"])
def test_a_link_to_nothing_is_no_image(root, target):
    """As where a disk is not mounted: a whole class of them is none."""
    (root / "train" / "cat" / "gone.jpg").symlink_to(target)
    found = opened(root)
    assert len(found.train) == 8 and found.notes["ignored"].startswith("1 link ")
    for image in (root / "train" / "cat").glob("?.jpg"):
        image.unlink()
    with pytest.raises(SetupError, match=r"\bcat .*\b1 link "):
        opened(root)


def test_links_between_folders_are_followed_once(tmp_path):
    root = photo_set(tmp_path / "pets", {"cat": 1, "dog": 1})
    for link, target in {"cat/x": "../dog", "dog/y": "../cat", "dog/z": "..", "dog/self": "self"}.items():
        (root / link).symlink_to(target)
    (tmp_path / "linked").symlink_to(root)
    for place in (root, tmp_path / "linked"):
        found = list(images_below(str(place), LeftOut()))
        assert found == ["cat/0.jpg", "cat/x/0.jpg", "dog/0.jpg", "dog/y/0.jpg"]


def test_names_that_are_no_text_are_written_as_text(tmp_path):
    for name in ("caf\udce9/\udce8.jpg", "caf\udce9/2.jpg", "dog/1.jpg", "dog/2.jpg"):
        photo(tmp_path / name)
    found = opened(tmp_path)
    assert found.classes == ("caf\\xe9", "dog") and found.notes["classes"].isascii()
    assert found.split_table().encode() and {len(found.train), len(found.val)} == {2}
    image, _ = found.train.read(0, 3)
    assert image.shape == (3, 30, 40)
    assert image_files([str(tmp_path / "caf\udce9")]).count == 2


def test_images_come_in_order_below_a_name(tmp_path):
    for name in ("b/2.jpg", "a.jpg", "b/1.jpg", "c.jpg"):
        photo(tmp_path / name)
    assert list(images_below(str(tmp_path), LeftOut(), "x")) == ["x/a.jpg", "x/b/1.jpg", "x/b/2.jpg", "x/c.jpg"]
    with pytest.raises(SetupError, match="cannot be listed"):
        listed(tmp_path / "nowhere", LeftOut())

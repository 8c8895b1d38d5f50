"""Damaged photos are found before the first step: refused, or skipped and told once, the same on every rank."""

import csv
import os

import pytest

from tests.command_line import QUIET, latest, losses, ok, result, trainer
from tests.data.photo_folders import cut, photo, photo_set
from trainer.data.damaged import looks_whole

KINDS = ("jpg", "png", "webp", "gif", "bmp", "tiff")


def zeros(path):
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("kind", KINDS)
def test_whole_images_look_whole_and_others_do_not(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    photo(path)
    assert looks_whole(os.fsencode(path))
    for damage in (*[cut] * (kind in ("jpg", "png", "webp")), zeros, lambda path: path.write_text("no photo")):
        damage(path)
        assert not looks_whole(os.fsencode(path))


def test_what_a_phone_writes_behind_a_jpeg_is_no_damage(tmp_path):
    path = tmp_path / "a.jpg"
    photo(path)
    with path.open("ab") as file:
        file.write(b"SEFT" * 100)
    assert looks_whole(os.fsencode(path))


@pytest.fixture
def photos(tmp_path):
    """Twelve photos of each class to train on and six held out; two and one of them are damaged."""
    root = tmp_path / "photos"
    photo_set(root, {"ant": 12, "bee": 12}, split=True, parts=("train",))
    photo_set(root, {"ant": 6, "bee": 6}, split=True, parts=("val",))
    cut(root / "train" / "ant" / "3.jpg")
    zeros(root / "train" / "bee" / "5.jpg")
    cut(root / "val" / "ant" / "1.jpg")
    return root


def words_for(photos, name, *more):
    words = ["model.name=cnn_gn", "data.name=imagefolder", f"data.root={photos}", "data.image_size=32"]
    words += ["augment.crop=resized", "batch_size=8", "epochs=2", "data.workers=1", *QUIET]
    return latest("mode=single", *words, f"output={photos.parent / name}", *more)


def skipped(folder):
    with (folder / "skipped.csv").open(newline="") as file:
        return {(row["split"], "/".join(row["file"].split("/")[-2:])) for row in csv.DictReader(file) if row["reason"]}


ALL = {("train", "ant/3.jpg"), ("train", "bee/5.jpg"), ("val", "ant/1.jpg")}


@pytest.mark.parametrize("words", [(), ("augment.crop=none",), ("mode=ddp", "nproc=2")])
def test_they_are_refused_before_the_first_step(photos, words):
    """In files, decoded into memory, and on two ranks, each of which sees some."""
    done = trainer(*words_for(photos, "run", *words))
    assert done.returncode == 3 and done.stderr.count("cannot be read") == 1, done.stderr
    assert "train/ant/3.jpg" in done.stderr and "train/bee/5.jpg" in done.stderr
    assert "data.on_error=skip" in done.stderr and not (photos.parent / "run").exists()


def test_skipped_ones_are_listed_and_the_order_stays(photos):
    checked, unchecked = photos.parent / "checked", photos.parent / "unchecked"
    said = ok(*words_for(photos, "checked", "data.on_error=skip")).stdout
    assert skipped(checked) == ALL
    [line] = [line for line in said.splitlines() if "skipped.csv" in line]
    assert " 2 training" in line and " 1 held-out" in line
    ok(*words_for(photos, "unchecked", "data.on_error=skip", "data.check=off"))
    assert not (unchecked / "skipped.csv").exists()
    assert losses(checked) == losses(unchecked) and result(checked)["val_loss"] == result(unchecked)["val_loss"]
    told = ok("evaluate", f"checkpoint={checked}").stdout
    assert "11 held-out images" in told and "1 more cannot be read" in told

"""Damaged photos are found before the first step.

They are refused, or skipped and reported once, the same on every rank.
"""

import csv
import os
import re

import pytest
from PIL import Image

from tests.command_line import QUIET, latest, losses, ok, result, trainer
from tests.data.photo_folders import coloured, cut, noise, photo, photo_set, read_image
from trainer.data.damaged import is_complete

KINDS = ("jpg", "png", "webp", "gif", "bmp", "tiff", "jp2", "ppm")


def zeros(path):
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("kind", KINDS)
def test_whole_images_look_whole_and_others_do_not(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    photo(path)
    assert is_complete(os.fsencode(path))
    for damage in (
        cut,
        zeros,
        lambda path: path.write_text("no photo"),
        lambda path: path.write_text(""),
    ):
        damage(path)
        assert not is_complete(os.fsencode(path))


def test_damage_that_no_decoder_reports(tmp_path):
    """Pillow does not compare a PNG's checksums, and libjpeg reads zeros as gray pixels."""
    for kind in ("png", "jpg"):
        path = tmp_path / f"a.{kind}"
        coloured(path, (90, 160, 200), size=(300, 256))
        assert read_image(path, 3).shape == (3, 256, 300)
        whole = path.read_bytes()
        last = len(whole) - 13
        checksum = whole[:last] + bytes([whole[last] ^ 255]) + whole[last + 1 :]
        padded = whole[: int(len(whole) * 0.7)] + bytes(10_000)
        path.write_bytes(checksum if kind == "png" else padded)
        assert Image.open(path).convert("RGB").size == (300, 256)
        assert not is_complete(os.fsencode(path))
        with pytest.raises(ValueError, match=r"checksum|zeros"):
            read_image(path, 3)


def test_a_webp_whose_chunks_do_not_fit_is_looked_at_and_one_with_metadata_is_whole(tmp_path):
    path = tmp_path / "a.webp"
    noise().save(path, exif=b"Exif\0\0II*\0\x08\0\0\0\0\0")
    whole = path.read_bytes()
    assert is_complete(os.fsencode(path))
    short = whole[: len(whole) // 2]
    for content in (
        short[:4] + (len(short) - 8).to_bytes(4, "little") + short[8:],
        short + bytes(len(short)),
    ):
        path.write_bytes(content)
        assert not is_complete(os.fsencode(path))


@pytest.mark.slow(cases=["png"])
@pytest.mark.parametrize(
    "kind", ["png", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gif", "tiff"))]
)
def test_training_and_prediction_tell_of_the_same_files(tmp_path, kind):
    root = tmp_path / "photos"
    photo_set(root, {"ant": 6, "bee": 6}, suffix=kind)
    ok(*words_for(root, "run"))
    damaged = root / "ant" / f"3.{kind}"
    content = damaged.read_bytes()
    place = len(content) // 2
    broken = content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :]
    damaged.write_bytes(broken if kind == "png" else content[:place])
    completed = trainer(*words_for(root, "again"))
    assert completed.returncode == 3
    [line] = [line for line in completed.stderr.splitlines() if "data.on_error=skip" in line]
    assert f"ant/3.{kind}" in line
    ok("predict", f"checkpoint={tmp_path / 'run'}", str(root), f"output={tmp_path / 'out'}")
    with (tmp_path / "out" / "predictions.csv").open(newline="") as file:
        assert [row["path"] for row in csv.DictReader(file) if row["error"]] == [str(damaged)]


def test_data_that_phones_append_to_a_jpeg_is_no_damage(tmp_path):
    path = tmp_path / "a.jpg"
    photo(path)
    with path.open("ab") as file:
        file.write(b"SEFT" * 100)
    assert is_complete(os.fsencode(path))


@pytest.fixture
def photos(tmp_path):
    """Twelve photos of each class to train on and six held out; two and one of them are damaged."""
    root = tmp_path / "photos"
    photo_set(
        root,
        {"ant": 12, "bee": 12},
        split=True,
        parts=("train",),
    )
    photo_set(
        root,
        {"ant": 6, "bee": 6},
        split=True,
        parts=("val",),
    )
    cut(root / "train" / "ant" / "3.jpg")
    zeros(root / "train" / "bee" / "5.jpg")
    cut(root / "val" / "ant" / "1.jpg")
    return root


def words_for(photos, name, *more):
    words = [
        "model.name=cnn_gn",
        "data.name=imagefolder",
        f"data.root={photos}",
        "data.image_size=32",
    ]
    words += ["augment.crop=resized", "batch_size=8", "epochs=2", "data.workers=1", *QUIET]
    return latest("mode=single", *words, f"output={photos.parent / name}", *more)


def skipped(folder):
    with (folder / "skipped.csv").open(newline="") as file:
        return {
            (row["split"], "/".join(row["file"].split("/")[-2:]))
            for row in csv.DictReader(file)
            if row["reason"]
        }


ALL = {("train", "ant/3.jpg"), ("train", "bee/5.jpg"), ("val", "ant/1.jpg")}


@pytest.mark.slow(cases=["words2"])
@pytest.mark.parametrize("words", [(), ("augment.crop=none",), ("mode=ddp", "nproc=2")])
def test_damaged_photos_are_refused_before_the_first_step(photos, words):
    """The images are read from files, decoded into memory, or read by two ranks."""
    completed = trainer(*words_for(photos, "run", *words))
    assert completed.returncode == 3, completed.stderr
    [line] = [line for line in completed.stderr.splitlines() if "/ant/3.jpg" in line]
    assert "train/ant/3.jpg" in line and "train/bee/5.jpg" in line
    assert "data.on_error=skip" in line and not (photos.parent / "run").exists()


@pytest.mark.slow
def test_skipped_ones_are_listed_and_the_order_stays(photos):
    checked = photos.parent / "checked"
    unchecked = photos.parent / "unchecked"
    output = ok(*words_for(photos, "checked", "data.on_error=skip")).stdout
    assert skipped(checked) == ALL
    [line] = [line for line in output.splitlines() if "skipped.csv" in line]
    assert " 2 training" in line and " 1 held-out" in line
    ok(*words_for(photos, "unchecked", "data.on_error=skip", "data.check=off"))
    assert not (unchecked / "skipped.csv").exists()
    assert losses(checked) == losses(unchecked)
    assert result(checked)["val_loss"] == result(unchecked)["val_loss"]
    printed = ok("evaluate", f"checkpoint={checked}").stdout
    assert re.search(r"\b11 held-out images\b.*\b1 more\b", printed)

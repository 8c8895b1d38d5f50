"""Photos as people have them, from the folder to predictions: turned by EXIF, among junk, nobody divided them."""

import csv

import numpy as np
import pytest
from PIL import ExifTags, Image
from sklearn.datasets import load_digits

from tests.command_line import QUIET, ok, result, trainer

EACH = 30  # photos of each of the ten classes
TURNED = {1: 0, 3: 180, 6: 90, 8: -90}  # how a camera lies for each orientation, in degrees
PLAIN = ["mode=single", "threads=1", *QUIET]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Thirty photos of each written digit, and small images of all others to learn from before."""
    home = tmp_path_factory.mktemp("own")
    pixels, labels = load_digits(return_X_y=True)
    for label in range(10):
        photos, others = home / "my photos" / f"number {label}", home / "others" / str(label)
        photos.mkdir(parents=True)
        others.mkdir(parents=True)
        for number, digit in enumerate(pixels[labels == label]):
            gray = Image.fromarray((digit.reshape(8, 8) * (255 / 16)).astype(np.uint8))
            if number < EACH:
                take(gray, list(TURNED)[number % 4], photos / f"IMG_{number:04}.JPG")
            else:
                gray.save(others / f"{number}.png")
        (photos / "._IMG_0001.JPG").write_bytes(b"junk")
    (home / "my photos" / "number 0" / "Thumbs.db").write_bytes(b"junk")
    (home / "my photos" / "number 1" / "clip.mov").write_bytes(b"no photo")
    return home / "my photos", home / "others"


def take(picture, orientation, path):
    """A photo of it, wider than high, by a camera that lies as the orientation says."""
    photo = Image.new("RGB", (80, 64), (8, 8, 8))
    photo.paste(picture.resize((64, 64), Image.Resampling.NEAREST), (8, 0))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    photo.rotate(TURNED[orientation], expand=True).save(path, quality=95, exif=exif)


@pytest.mark.slow
def test_ninety_in_a_hundred_of_ten_classes_with_thirty_photos_each(folders, tmp_path):
    """From weights trained here, with the recipe's defaults."""
    photos, others = folders
    ok("recipe=digits", *PLAIN, "data.name=imagefolder", f"data.root={others}", f"output={tmp_path / 'weights'}")
    words = ["recipe=finetune", *PLAIN, f"data.root={photos}", "model.name=cnn"]
    said = ok(*words, f"model.init_from={tmp_path / 'weights'}", f"output={tmp_path / 'run'}").stdout
    assert "240 training images, 60 held out" in said and "10 classes" in said and "1 x 8 x 8" in said
    ignored = result(tmp_path / "run")["facts"]["ignored"]
    assert "11 hidden files" in ignored and "1 other file (.mov)" in ignored and "11 hidden files" in said
    assert result(tmp_path / "run")["val_top1"] >= 0.9
    assert "60 held-out images" in ok("evaluate", f"checkpoint={tmp_path / 'run'}").stdout
    ok("predict", f"checkpoint={tmp_path / 'run'}", f"data.root={photos}", f"output={tmp_path / 'told'}")
    with (tmp_path / "told" / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10 * EACH and {row["class"] for row in rows} == {f"number {n}" for n in range(10)}
    assert sum(row["class"] == row["path"].split("/")[-2] for row in rows) >= 0.9 * len(rows)


def test_what_fails_before_the_first_step_leaves_no_folder_below_runs(folders, tmp_path):
    words = [*PLAIN, f"data.root={folders[0]}", "model.init_from=/nowhere"]
    done = trainer("recipe=finetune", "model.name=cnn", *words, cwd=tmp_path)
    assert done.returncode != 0 and "'/nowhere' is not there" in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []

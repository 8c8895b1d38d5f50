"""A run as an object for programs: what it says of images is what the command writes, however the images come."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import trainer
from tests.command_line import ok
from trainer.errors import CheckpointError, PredictionError, RecipeError, SetupError

COLOURS = {"blue": (20, 40, 220), "green": (30, 200, 40), "red": (220, 30, 30)}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Photos of three colours, and a run below runs/ that tells them apart."""
    home, dice = tmp_path_factory.mktemp("home"), np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (home / "photos" / name).mkdir(parents=True)
        for number in range(12):
            pixels = np.clip(np.array(colour) + dice.normal(0, 20, (40, 36, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(home / "photos" / name / f"{number}.png")
    words = ["data.name=imagefolder", "data.root=photos", "data.image_size=32", "model.name=cnn", "mode=single"]
    ok(*words, "batch_size=8", "epochs=4", "optimizer.lr=0.02", "output=runs/first", "threads=1", cwd=home)
    return home


@pytest.fixture
def run(home, monkeypatch):
    monkeypatch.chdir(home)
    return trainer.load()


def as_tensor(path):
    return torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)


def test_the_newest_run_says_what_a_photo_is(run, home):
    assert run.path == Path("runs/first") and run.classes == ("blue", "green", "red") and not run.model.training
    for colour in COLOURS:
        told = run.predict(f"photos/{colour}/3.png")
        assert told.label == colour and told.labels[0] == colour and len(told.labels) == 3
        assert told.probability == max(told.probabilities) and sum(told.probabilities) == pytest.approx(1)


@pytest.mark.parametrize(
    "form",
    [str, Path, Image.open, lambda path: np.array(Image.open(path)), as_tensor],
    ids=["text", "path", "pillow", "array", "tensor"],
)
def test_a_photo_in_any_form_is_the_same_photo(form, run):
    path = "photos/green/1.png"
    assert run.predict(form(path)) == run.predict(path)
    assert run.predict([form(path), path]) == run.predict([path, path])


@pytest.mark.parametrize("mode", ["P", "L", "1", "RGBA", "I;16"])
def test_a_pillow_image_of_any_mode_is_as_its_file(mode, run, tmp_path):
    image = Image.open("photos/red/2.png")
    image = (
        Image.fromarray(np.array(image.convert("L")).astype(np.uint16) * 257) if mode == "I;16" else image.convert(mode)
    )
    image.save(tmp_path / "x.png")
    assert run.predict(image) == run.predict(tmp_path / "x.png")


def test_folders_batches_and_several_devices_give_lists_in_order(run):
    folder = run.predict("photos")
    assert [told.label for told in folder] == [colour for colour in COLOURS for _ in range(12)]
    batch = torch.stack([as_tensor(f"photos/red/{n}.png") for n in range(3)])
    expected = run.predict([f"photos/red/{n}.png" for n in range(3)])
    assert run.predict(batch) == run.predict(batch.permute(0, 2, 3, 1).numpy()) == expected
    assert run.predict([]) == []
    workers = run.predict("photos", devices=["cpu", "cpu"])
    assert [told.labels for told in workers] == [told.labels for told in folder]
    for one, other in zip(workers, folder, strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)


def test_it_says_what_the_command_prints_and_writes(run, home):
    done = ok("predict", "checkpoint=runs/first", "data.root=photos/blue/0.png", "output=p", cwd=home)
    (row,) = csv.DictReader((home / "p" / "predictions.csv").open())
    told = run.predict("photos/blue/0.png")
    assert row["class"] == told.label and float(row["probability"]) == pytest.approx(told.probability, rel=1e-5)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("photos/blue/0.png"))
    assert line.split()[1:3] == ["blue", f"{told.probability:.0%}"]


def test_photos_and_folders_are_asked_of_the_newest_run_that_is_named(run, home):
    done = ok("predict", "photos/blue/0.png", "photos/green", "output=several", cwd=home)
    rows = list(csv.DictReader((home / "several" / "predictions.csv").open()))
    assert "runs/first" in done.stdout and [row["class"] for row in rows] == ["blue"] + ["green"] * 12
    done = ok("predict", "photos/red/0.png", "first", "output=one", cwd=home)
    assert "photos/red/0.png  red" in done.stdout


def test_of_many_images_only_the_file_tells(home):
    done = ok("predict", "checkpoint=runs/first", "data.root=photos/blue", "output=many", cwd=home)
    assert "photos/blue/0.png" not in done.stdout and "many/predictions.csv" in done.stdout


def test_it_evaluates_and_exports_as_the_commands_do(run, home, capsys):
    assert run.evaluate("mode=single")["val_top1"] == 1.0
    written = run.export("safetensors", home / "x.safetensors")
    assert written.is_file() and trainer.load(written).predict("photos/red/0.png") == run.predict("photos/red/0.png")
    with pytest.raises(RecipeError, match="there already"):
        run.export("safetensors", home / "x.safetensors")
    with pytest.raises(RecipeError, match="onnx"):
        run.export("onx")


@pytest.mark.parametrize(
    ("images", "error", "names"),
    [
        (["photos/red/0.png", "photos/none.png"], PredictionError, "photos/none.png"),
        (7, RecipeError, "int"),
        (b"x", RecipeError, "bytes"),
        ({"a": 1}, RecipeError, "dict"),
        (torch.zeros(3, 8, 8), RecipeError, "float32"),
        (np.zeros((8, 8, 4), np.uint8), RecipeError, "4"),
        (torch.zeros(8, 8, dtype=torch.uint8), RecipeError, "8"),
        ("runs/first/checkpoints", SetupError, "checkpoints"),
    ],
    ids=str,
)
def test_what_is_no_image_is_named(images, error, names, run):
    with pytest.raises(error, match=names):
        run.predict(images)


def test_no_run_is_told(tmp_path, monkeypatch, home):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="runs"):
        trainer.load()
    with pytest.raises(RecipeError, match="int"):
        trainer.load(3)
    shutil.copytree(home / "runs", tmp_path / "runs")
    assert trainer.load("first").classes == ("blue", "green", "red"), "the photos need not be there"

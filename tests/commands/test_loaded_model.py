"""A run as a Python object: its answers for images of any form equal those of the command."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import trainer
from tests.command_line import ok
from tests.data.photo_folders import coloured
from trainer.errors import CheckpointError, PredictionError, RecipeError, SetupError

COLOURS = {
    "blue": (20, 40, 220),
    "green": (30, 200, 40),
    "red": (220, 30, 30),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Make photos of three colors, and a run below runs/ that distinguishes them."""
    home = tmp_path_factory.mktemp("home")
    for name, colour in COLOURS.items():
        for number in range(12):
            coloured(home / "photos" / name / f"{number}.png", colour, (36, 40), seed=number)
    words = [
        "data.name=imagefolder",
        "data.root=photos",
        "data.image_size=32",
        "model.name=cnn",
        "mode=single",
    ]
    ok(
        *words,
        "batch_size=8",
        "epochs=4",
        "optimizer.lr=0.02",
        "output=runs/first",
        "threads=1",
        cwd=home,
    )
    return home


@pytest.fixture
def run(home, monkeypatch):
    monkeypatch.chdir(home)
    return trainer.load()


def as_tensor(path):
    return torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)


def test_the_newest_run_labels_a_photo(run, home):
    assert run.path == Path("runs/first")
    assert run.classes == ("blue", "green", "red")
    assert not run.model.training
    for colour in COLOURS:
        message = run.predict(f"photos/{colour}/3.png")
        assert message.label == colour and message.labels[0] == colour and len(message.labels) == 3
        assert message.probability == max(message.probabilities)
        assert sum(message.probabilities) == pytest.approx(1)


@pytest.mark.parametrize(
    "form", [str, Path, Image.open, lambda path: np.array(Image.open(path)), as_tensor]
)
def test_a_photo_in_any_form_is_the_same_photo(form, run):
    path = "photos/green/1.png"
    assert run.predict(form(path)) == run.predict(path)
    assert run.predict([form(path), path]) == run.predict([path, path])


@pytest.mark.parametrize("devices", [None, ["cpu"]])
def test_an_image_that_cannot_be_read_costs_no_others_answer(devices, run, tmp_path):
    (tmp_path / "cut.png").write_bytes(Path("photos/red/0.png").read_bytes()[:300])
    good = ["photos/red/1.png", Image.open("photos/green/1.png"), as_tensor("photos/blue/1.png")]
    images = [
        good[0],
        "photos/none.png",
        good[1],
        Image.open(tmp_path / "cut.png"),
        good[2],
    ]
    answers = run.predict(images, devices=devices, on_error="skip")
    failed = {
        place: str(answer)
        for place, answer in enumerate(answers)
        if isinstance(answer, PredictionError)
    }
    assert [*failed] == [1, 3]
    assert "photos/none.png" in failed[1]
    assert "image 3" in failed[3]
    messages = [answers[place] for place in (0, 2, 4)]
    assert [answer.label for answer in messages] == ["red", "green", "blue"]
    assert [answer.labels for answer in messages] == [answer.labels for answer in run.predict(good)]
    with pytest.raises(PredictionError, match=r"photos/none\.png.*on_error='skip'"):
        run.predict(images, devices=devices)
    with pytest.raises(PredictionError, match=r"photos/none\.png"):
        run.predict("photos/none.png", devices=devices)
    with pytest.raises(RecipeError, match=r"'ignore'.*'skip'"):
        run.predict(images, on_error="ignore")


def test_folders_batches_and_several_devices_give_lists_in_order(run):
    folder = run.predict("photos")
    assert [message.label for message in folder] == [
        colour for colour in COLOURS for _ in range(12)
    ]
    batch = torch.stack([as_tensor(f"photos/red/{n}.png") for n in range(3)])
    expected = run.predict([f"photos/red/{n}.png" for n in range(3)])
    assert run.predict(batch) == run.predict(batch.permute(0, 2, 3, 1).numpy()) == expected
    assert run.predict([]) == []
    workers = run.predict("photos", devices=["cpu", "cpu"])
    assert [message.labels for message in workers] == [message.labels for message in folder]
    for one, other in zip(workers, folder, strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)


def test_photos_and_folders_are_asked_of_the_newest_run(run, home):
    """For more than ten images only the file has the answers."""
    lines = ok("predict", "photos/blue/0.png", "output=p", cwd=home).stdout.splitlines()
    [messages] = [line.split()[1:3] for line in lines if line.startswith("photos/blue/0.png")]
    assert messages == ["blue", f"{run.predict('photos/blue/0.png').probability:.0%}"]
    completed = ok("predict", "photos/blue/0.png", "photos/green", "output=several", cwd=home)
    rows = list(csv.DictReader((home / "several" / "predictions.csv").open()))
    assert "runs/first" in completed.stdout
    assert [row["class"] for row in rows] == ["blue"] + ["green"] * 12
    assert (
        "photos/blue/0.png" not in completed.stdout
        and "several/predictions.csv" in completed.stdout
    )


@pytest.mark.slow
def test_a_loaded_model_evaluates_and_exports_like_the_commands(run, home, capsys):
    assert run.evaluate("mode=single")["val_top1"] == 1.0
    assert run.export("exported_program", home / "x.pt2").is_file()
    with pytest.raises(RecipeError, match="there already"):
        run.export("exported_program", home / "x.pt2")
    with pytest.raises(RecipeError, match="onnx"):
        run.export("onx")


@pytest.mark.parametrize(
    ("images", "error", "names"),
    [
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
def test_an_input_that_is_no_image_is_named(images, error, names, run):
    with pytest.raises(error, match=names):
        run.predict(images)


def test_a_missing_run_is_reported(tmp_path, monkeypatch, home):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="runs"):
        trainer.load()
    with pytest.raises(RecipeError, match="int"):
        trainer.load(3)
    shutil.copytree(home / "runs", tmp_path / "runs")
    assert trainer.load("first").classes == ("blue", "green", "red"), "the photos need not be there"


def test_mirror_images_are_averaged_and_features_come_along(run):
    """The same by plain torch, with the classifier removed."""
    paths = [f"photos/{colour}/0.png" for colour in COLOURS]
    asking = trainer.load("runs/first", "predict.tta=flip", "predict.features=true")
    inputs = []
    hook = run.model.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    run.predict(paths)
    hook.remove()
    views = [inputs[0], inputs[0].flip(3)]
    layers = list(run.model.children())
    assert isinstance(layers[-1], torch.nn.Linear)
    with torch.no_grad():
        probabilities = sum(run.model(view).softmax(1) for view in views) / 2
        features = sum(torch.nn.Sequential(*layers[:-1])(view) for view in views) / 2
        one_view = run.model(views[0]).softmax(1)
        unlike = (one_view - probabilities).abs().max()
    assert unlike > 1e-4
    for devices in (None, ["cpu", "cpu"]):
        for row, answer in enumerate(asking.predict(paths, devices=devices)):
            given = dict(zip(answer.labels, answer.probabilities, strict=True))
            actual = [given[name] for name in run.classes]
            assert actual == pytest.approx(probabilities[row].tolist(), abs=1e-5)
            assert answer.features.dtype == np.float32
            np.testing.assert_allclose(answer.features, features[row], rtol=1e-4, atol=1e-5)
    assert run.predict(paths[0]).features is None

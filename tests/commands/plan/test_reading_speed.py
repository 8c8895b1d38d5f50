"""What a plan tells of reading photos on this machine."""

import pytest

from tests.data.photo_folders import photo_set
from tests.typed import odd
from trainer.commands.plan import measured, planned
from trainer.commands.plan.plan_page import page_of
from trainer.commands.plan.run_plan import RunPlan
from trainer.processes.resources import cores
from trainer.recipe import load
from trainer.telemetry.verdict import Reading


def of_photos(root, *words):
    plain = {"mode": "single", "model.name": "cnn_gn", "data.name": "imagefolder", "data.root": root, "batch_size": 4}
    plain |= {"data.image_size": 72, "augment.crop": "resized", "data.workers": 2}
    plain |= dict(word.split("=") for word in words)
    return planned(load(None, *(f"{key}={value}" for key, value in plain.items())))


@pytest.fixture
def photos(tmp_path):
    return photo_set(tmp_path / "photos", {"cat": 5, "dog": 5}, suffix="png")


def test_of_photos_it_tells_the_speed(photos):
    whole = of_photos(photos)
    found = whole.to_dict()
    told = found["reading"]
    assert not odd(found, RunPlan) and told["processes"] == min(2, cores()) and told["bound"] is None
    seconds = told["read_seconds"] + told["decode_seconds"] + told["transform_seconds"]
    assert told["samples_per_sec"] == pytest.approx(told["processes"] / seconds)
    page = page_of(whole)
    assert "images/s by" in page and "limits the run" not in page


@pytest.mark.parametrize(
    ("words", "wanted", "bound"),
    [((), 40, "model"), ((), 60, "loader"), (("data.cache=disk",), 60, "model"), (("data.cache=disk",), 300, "loader")],
)
def test_the_slower_of_loader_and_model_bounds_the_run(monkeypatch, words, wanted, bound):
    monkeypatch.setattr(measured, "measure_reading", lambda *_: Reading(0.01, 0.01, 0.02, 0.01))
    monkeypatch.setattr(measured, "cores", lambda: 2)
    recipe = load(None, "data.workers=2", *words)
    images = type("", (), {"photos": [0], "size": 72, "channels": 3, "val": 0})()
    assert measured.reading(recipe, images, 1, wanted).bound == bound


def test_where_nothing_is_read_nothing_is_told(photos):
    assert of_photos(photos, "data.image_size=32", "augment.crop=none").reading is None  # decoded once and for all
    assert of_photos("nowhere").reading is None
    assert planned(load("digits", "mode=single")).reading is None

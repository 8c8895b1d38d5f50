"""The metadata of weights, which is not trusted; which photos a run was trained on, by split.csv or their folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.photo_folders import photo_set
from trainer.commands.evaluate import recipe_of
from trainer.commands.predict.trained_model import _prepared, trained_on
from trainer.errors import CheckpointError
from trainer.recipe import load

FACTS = {"classes": '["a", "b"]', "mean": "[0.5]", "std": "[0.2]", "image_size": "8", "channels": "1"}


@pytest.mark.parametrize(
    "damage",
    [
        {"classes": "[" * 9999}, {"classes": "5"}, {"mean": '["x"]'}, {"std": "[1, 2]"}, {"image_size": "-1"},
        {"channels": "99999999999"}, {"channels": ""}, {"mean": "NaN"}, {"shorter_side": "-1"}, {"shorter_side": "x"},
        {"mean": "[NaN]"}, {"mean": "[1e300]"}, {"std": "[0]"}, {"std": "[-1]"}, {"std": "[Infinity]"},
        {"image_size": "0"}, {"image_size": "65536"}, {"image_size": "9" * 5000}, {"shorter_side": "65536"},
        {"shorter_side": "17"}, {"shorter_side": "7"}, {"mean": "[" * 9999 + "]" * 9999},
        {"classes": '["a"' + ',"b"' * 2**20 + "]"},
    ],
)  # fmt: skip
def test_what_weights_tell_of_their_images_is_not_trusted(tmp_path, damage):
    classes, how = _prepared(tmp_path, FACTS, None)
    assert (classes, how.channels, how.image_size) == (("a", "b"), 1, 8)
    with pytest.raises(CheckpointError, match="makes no sense"):
        _prepared(tmp_path, FACTS | damage, None)


@pytest.mark.parametrize(
    ("told", "asked", "shorter"),
    [({}, None, 256), ({"shorter_side": "224"}, None, 224), ({"shorter_side": "256"}, 64, 64)],
)
def test_weights_tell_how_much_is_cut_off(tmp_path, told, asked, shorter):
    """Those of before do not, and photos were all that could be trained on with so many pixels."""
    assert _prepared(tmp_path, FACTS | {"image_size": "224"} | told, asked)[1].shorter_side == shorter


@pytest.mark.parametrize(
    "told",
    [{"threads": 10**9}, {"batch_size": 10**12}, {"data": {"image_size": 65536}}, {"model": {"num_classes": 2**40}}],
)
def test_a_recipe_in_weights_has_bounds(tmp_path, told):
    with pytest.raises(CheckpointError, match=r"recipe .*must be"):
        recipe_of(tmp_path, {"recipe": json.dumps(told)}, ())


@pytest.mark.parametrize("told", ["[", "5", "{}x", '{"epochs": "many"}', "[" * 9999, '{"model": 7}'])
def test_a_damaged_recipe_in_weights_is_one_line(tmp_path, told):
    with pytest.raises(CheckpointError, match=r" recipe\b") as caught:
        recipe_of(tmp_path, {"recipe": told}, ())
    assert "\n" not in str(caught.value)


def recipe(root: Path, *words: str):
    return load(None, "data.name=imagefolder", f"data.root={root}", *words)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder, with nothing in it that says."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").touch()
    return tmp_path / "run"


@pytest.mark.parametrize("labels", [[], ["data.labels=labels.csv"]])
def test_by_the_split_that_the_run_made(tmp_path, run, monkeypatch, labels):
    photos = photo_set(tmp_path / "photos", {"cat": 2, "dog": 2})
    lines = ["file,label,split", "cat/0.jpg,cat,train", "cat/1.jpg,cat,val", "dog/0.jpg,dog,train", "dog/1.jpg,dog,val"]
    (run / "split.csv").write_text("\n".join(lines))
    found = trained_on(run / "last.safetensors", recipe(photos, *labels))
    (tmp_path / "link").symlink_to(photos)
    monkeypatch.chdir(tmp_path)
    for root in (str(photos), "photos", "link", "./run/../photos"):
        seen = [name for name in ("cat/0.jpg", "cat/1.jpg", "dog/0.jpg", "dog/1.jpg") if f"{root}/{name}" in found]
        assert seen == ["cat/0.jpg", "dog/0.jpg"]
    others = photo_set(tmp_path / "others", {"cat": 2, "dog": 2})
    assert str(others / "cat" / "0.jpg") not in found


def test_by_the_folders_of_a_divided_set(tmp_path, run):
    photos = photo_set(tmp_path / "photos", {"cat": 2, "dog": 2}, split=True)
    found = trained_on(run, recipe(photos))
    assert str(photos / "train" / "cat" / "1.jpg") in found and str(photos / "val" / "cat" / "1.jpg") not in found
    assert str(tmp_path / "photos" / "training.jpg") not in found


def test_where_nothing_tells(tmp_path, run):
    photos = photo_set(tmp_path / "photos", {"cat": 2, "dog": 2})
    for words in ([], ["data.labels=labels.csv"]):
        assert trained_on(run, recipe(photos, *words)) is None
    assert trained_on(run, recipe(tmp_path / "gone")) is None
    assert trained_on(run, load("digits")) is None

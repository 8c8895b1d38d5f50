"""Which photos a run was trained on, by split.csv or their folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.photo_folders import photo_set
from trainer.commands.predict.trained_model import trained_on
from trainer.recipe import load


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

"""Runs side by side."""

import json

import pytest

from tests.commands.runs.folders import make
from trainer.commands import runs
from trainer.errors import SetupError
from trainer.telemetry import plots


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_what_differed_and_what_came_of_it(home, tmp_path):
    make(home / "a", "optimizer.lr=0.05", "output=runs/a")
    make(home / "b", "optimizer.lr=0.2", "model.name=mlp", val_top1=0.8, throughput={"samples_per_sec": 50.0})
    lines = [line.split() for line in runs.command(["compare", "a", "runs/b"]).splitlines()]
    assert lines[:3] == [["a", "b"], ["model.name", "cnn", "mlp"], ["optimizer.lr", "0.05", "0.2"]]
    assert ["val", "top1", "90.00%", "80.00%"] in lines and ["images/s", "1,234", "50"] in lines
    assert ["curves:", "runs/compare-a-b.png"] in lines and [*tmp_path.glob("*.png")] == []
    assert (home / "compare-a-b.png").read_bytes().startswith(b"\x89PNG")


def test_alike_recipes_many_runs_and_names_that_are_alike(home, tmp_path):
    for name in ("x/run", "y/run", "z/run"):
        make(home / name)
    text = runs.command(["compare", "x/run", "y/run", "z/run", "output=some.png"])
    assert "the same" in text and (tmp_path / "some.png").is_file()
    assert text.splitlines()[0].split() == ["runs/x/run", "runs/y/run", "runs/z/run"]
    assert max(map(len, text.splitlines())) <= 100


def test_without_curves_the_figures_are_told(home, tmp_path):
    make(home / "a", curve=False)
    (make(home / "b", curve=False) / "steps.csv").unlink()
    text = runs.command(["compare", "a", "b"])
    assert "(steps.csv: No such file or directory)\n" in text and "no picture: " in text
    assert [*tmp_path.rglob("*.png")] == []


def test_a_run_of_one_point_is_drawn_too(home, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "curves", lambda path, panels: drawn.extend(panels))
    make(home / "long")
    make(home / "short", curve=False)
    runs.command(["compare", "long", "short"])
    losses = [panel for panel in drawn if panel.ylabel == "training loss"]
    assert [loss.xlabel for loss in losses] == ["optimizer steps", "seconds"]
    for loss in losses:
        assert list(loss.curves) == ["long", "short"] and len(loss.curves["short"][0]) == 1


def test_an_old_recipe_is_compared_by_what_it_says(home):
    make(home / "a")
    (make(home / "b") / "recipe.yaml").write_text("mode: ddp\nkey_of_old: 5\n")
    text = runs.command(["compare", "a", "b"])
    assert any(line.split() == ["key_of_old", "null", "5"] for line in text.splitlines())


def test_a_run_without_a_recipe_hides_no_difference(home):
    for name, lr in (("a", 0.1), ("b", 0.2), ("c", 0.3)):
        make(home / name, f"optimizer.lr={lr}")
    (home / "c" / "recipe.yaml").unlink()
    lines = runs.command(["compare", "c", "a", "b"]).splitlines()
    assert [line.split() for line in lines[:3]] == [["c", "a", "b"], ["optimizer.lr", "-", "0.1", "0.2"], []]
    assert "c: no recipe.yaml" in lines


@pytest.mark.parametrize("last", ["nan", "inf"])
def test_a_loss_that_was_no_number(home, last):
    make(home / "a", status="failed", val_top1=None, best_top1=None, best_epoch=None, losses=[1.5, None])
    make(home / "b")
    with (home / "a" / "steps.csv").open("a") as file:
        file.write(f"20,1,2.0,{last},0.1,\n")
    text = runs.command(["compare", "a", "b"])
    assert ["status", "failed", "completed"] in [line.split() for line in text.splitlines()]
    assert "curves: runs/compare-a-b.png" in text


def test_other_tasks_have_other_figures(home):
    make(home / "a")
    make(
        home / "b", "task.name=regression", val_top1=None, best_top1=None, task="regression", val_mae=0.5, best_mae=0.4
    )
    lines = [line.split() for line in runs.command(["compare", "a", "b"]).splitlines()]
    assert ["task.name", "classification", "regression"] in lines and ["best", "mae", "-", "0.4"] in lines


def test_json(home):
    make(home / "a")
    make(home / "b", "epochs=3")
    found = json.loads(runs.command(["compare", "a", "b", "--json"]))
    assert found["recipe"] == {"epochs": {"a": 30, "b": 3}} and [one["name"] for one in found["runs"]] == ["a", "b"]


def test_a_picture_that_has_no_place(home):
    make(home / "a")
    make(home / "b")
    with pytest.raises(SetupError, match=r"output=no/where\.png.* no\b"):
        runs.command(["compare", "a", "b", "output=no/where.png"])

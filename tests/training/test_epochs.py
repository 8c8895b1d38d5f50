"""Epochs are counted from 1: on the screen, in steps.csv, in result.json."""

import re
from types import SimpleNamespace

import pytest

from tests.command_line import ok, result, steps
from trainer.recipe import load
from trainer.tasks.classification import Classification
from trainer.training import reporting
from trainer.training.run import History


def test_one_way_of_counting_everywhere(tmp_path):
    words = ["recipe=digits", "mode=single", "model.name=mlp", "epochs=3", "logging.every_steps=1"]
    lines = ok(*words, f"output={tmp_path / 'run'}").stdout
    assert [line.split()[1] for line in lines.splitlines() if line.startswith("epoch ")] == ["1/3", "2/3", "3/3"]
    assert [row["epoch"] for row in steps(tmp_path / "run")] == [n for n in "123" for _ in range(14)]
    assert all(", epoch 1/3" in line for line in lines.splitlines() if line.startswith("step 1/"))
    found = result(tmp_path / "run")
    shown = [line.partition("top-1 ")[2].split()[0] for line in lines.splitlines() if line.startswith("epoch ")]
    assert shown[found["best_epoch"] - 1] == f"{found['best_top1']:.2%}"


@pytest.mark.parametrize(
    ("best_epoch", "said"), [(1, "(best top-1 95.00% in epoch 2: best.safetensors)"), (2, ""), (1, "")]
)
def test_the_last_line_tells_the_best_epoch_where_it_was_better(best_epoch, said, tmp_path):
    recipe = load("digits", "logging.tensorboard=false")
    best = 0.95 if said else 0.9
    history = History(losses=[1.0, 0.5, 0.4], validation={"val_top1": 0.9}, best=best, best_epoch=best_epoch)
    told = SimpleNamespace(
        history=history,
        task=Classification(recipe, ("a", "b"), None),
        recipe=recipe,
        tracker=SimpleNamespace(path=tmp_path),
        speed_only=False,
    )
    parts = {"throughput": None, "short": False, "seconds": 5.0, "pipeline": None, "verdict": None}
    line = reporting.last_line(told, {**parts, "data": {"val_samples": 360, "skipped": 0, "uncached": 0}})
    assert line.startswith(f"done: top-1 90.00% {said}{' ' * bool(said)}on 360 held-out images")


@pytest.mark.parametrize(("most", "said"), [(0.3, "; at most 30.0%"), (0.1, "; 12.0% pred")])
def test_the_last_line_tells_the_most_that_a_bubble_may_be(most, said, tmp_path):
    recipe = load("digits", "logging.tensorboard=false")
    history = History(losses=[1.0], validation={"val_top1": 0.9})
    told = SimpleNamespace(history=history, task=Classification(recipe, ("a", "b"), None), recipe=recipe)
    told.tracker, told.speed_only = SimpleNamespace(path=tmp_path), False
    parts = {"throughput": None, "short": False, "seconds": 5.0, "verdict": None}
    parts["pipeline"] = {"bubble_measured": 0.1, "bubble_at_most": most, "bubble_predicted": 0.12}
    line = reporting.last_line(told, {**parts, "data": {"val_samples": 360, "skipped": 0, "uncached": 0}})
    assert re.search(rf"  bubble   10\.0% .*{said}", line)

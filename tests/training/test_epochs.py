"""Epochs are counted from 1: on the screen, in steps.csv, in result.json."""

import re
from types import SimpleNamespace

import pytest

from tests.command_line import QUIET, latest, ok, result, rows, steps, trainer
from trainer.recipe import load
from trainer.tasks.classification import Classification, Multilabel
from trainer.tasks.regression import Regression
from trainer.training import reporting
from trainer.training.state import History

TITLES = ["epoch", "train loss", "val loss", "top-1", "top-5", "lr", "images/s", "seconds", "left"]


def test_one_way_of_counting_everywhere(tmp_path):
    words = ["recipe=digits", "mode=single", "model.name=mlp", "epochs=3", "logging.every_steps=1"]
    lines = ok(*words, f"output={tmp_path / 'run'}").stdout.splitlines()
    [head] = (place for place, line in enumerate(lines) if re.split(r"  +", line.strip()) == TITLES)
    rows = [line.split() for line in lines[head + 1 : head + 4]]
    assert [cells[0] for cells in rows] == ["1/3", "2/3", "3/3"]
    assert {len(line) for line in lines[head : head + 4]} == {len(lines[head])}, (
        "columns are aligned"
    )
    assert [row["epoch"] for row in steps(tmp_path / "run")] == [
        n for n in "123" for _ in range(14)
    ]
    run_result = result(tmp_path / "run")
    assert rows[run_result["best_epoch"] - 1][3] == f"{run_result['best_top1']:.2%}"
    assert rows[2][1:5] == [
        f"{run_result[key]:{form}}"
        for key, form in zip(
            ("train_loss", "val_loss", "val_top1", "val_top5"),
            (".4f", ".4f", ".2%", ".2%"),
            strict=True,
        )
    ]


@pytest.mark.parametrize(
    ("kind", "classes", "values", "titles"),
    [
        (Classification, 10, {"loss": 1.0, "top1": 0.5, "top5": 0.9}, TITLES[2:5]),
        (Classification, 2, {"loss": 1.0, "top1": 0.5, "top5": 1.0}, TITLES[2:4]),
        (Multilabel, 3, {"loss": 1.0, "f1": 0.5, "f1_macro": 0.5}, ["val loss", "F1", "F1 macro"]),
        (Regression, 1, {"loss": 1.0, "mae": 0.5, "r2": 0.5}, ["val loss", "MAE", "R2"]),
    ],
)
def test_each_task_has_the_columns_that_make_sense(kind, classes, values, titles):
    recipe = load("digits")
    history = History(
        losses=[2.0], validation={f"val_{name}": value for name, value in values.items()}
    )
    task = kind(recipe, tuple(map(str, range(classes))), None)
    resolved = SimpleNamespace(recipe=recipe, task=task)
    state = SimpleNamespace(history=history, lr=9.7553e-5)
    memory = {"cuda:0": 2**30, "cuda:1": 3 * 2**30, "cpu": 2**40}
    row = reporting.build_epoch_row(resolved, state, 0, 48.0, 5.0, memory)
    assert list(row) == ["epoch", "train loss", *titles, *TITLES[5:8], "GPU GiB"]
    assert (float(row["images/s"]), float(row["lr"]), row["GPU GiB"]) == (48, 9.76e-5, "3.00")


def told(tmp_path, warnings=None, std=1329.0, announced=(), **changes):
    """The last lines of a run, by title."""
    recipe = load("digits", "logging.tensorboard=false")
    history = History(
        losses=[1.0, 0.5, 0.4],
        validation={"val_top1": 0.9},
        **changes,
    )
    task = Classification(recipe, ("a", "b"), None)
    resolved = SimpleNamespace(task=task, recipe=recipe, speed_only=False)
    resolved.tracker = SimpleNamespace(path=tmp_path)
    parts = {
        "throughput": {"samples_per_sec": 4698.4, "std": std},
        "short": False,
        "ended_by": "epochs",
        "seconds": 5.0,
        "verdict": None,
        "knn_top1": None,
    }
    parts |= {
        "warnings": warnings or {},
        "data": {
            "val_samples": 360,
            "skipped": 0,
            "uncached": 0,
        },
    }
    return reporting.build_last_lines(resolved, history, {}, parts, announced)


@pytest.mark.parametrize(
    ("best_epoch", "said"), [(1, "(best 95.00% in epoch 2)"), (2, ""), (1, "")]
)
def test_the_last_line_has_the_best_epoch_if_it_was_better(best_epoch, said, tmp_path):
    lines = told(tmp_path, best=0.95 if said else 0.9, best_epoch=best_epoch)
    line = lines["done"]
    assert lines.get("best") == (f"{tmp_path}/best.safetensors" if said else None)
    assert line.startswith(
        f"top-1 90.00% {said}{' ' * bool(said)}on 360 held-out images, 4,698 images/s, "
    )


def test_a_meaningless_rate_is_not_printed(tmp_path):
    """Problems are reported even without a verdict."""
    assert "4,698 images/s" in told(tmp_path)["done"] and "warning" not in told(tmp_path)
    lines = told(tmp_path, warnings={"rate": "it scatters", "loss": "it grows"}, std=5000.0)
    assert "4,698" not in lines["done"]
    assert lines["warning"].splitlines() == [
        "it scatters",
        "it grows",
    ]


def test_the_load_of_the_machine_is_printed_once(tmp_path):
    warnings = {"loss": "it grows", "cores": "others used them"}
    assert told(tmp_path, warnings)["warning"] == "it grows\nothers used them"
    assert told(tmp_path, warnings, announced={"loss", "cores"})["warning"] == "it grows"


@pytest.mark.slow(cases=["mode1"])
@pytest.mark.parametrize("mode", [["mode=single"], ["mode=ddp", "nproc=2"]])
def test_epochs_csv_of_a_killed_run_is_that_of_a_whole_one(mode, tmp_path):
    """The run is killed after the second evaluation, and resumed from a step before it."""
    words = ["recipe=digits", "model.name=mlp", "epochs=3", "threads=1", *mode, *QUIET]
    words += ["save.every_epochs=null", "save.every_steps=20", "stop.patience=2"]
    words += ["task.metric=auroc"]
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    ok(*words, f"output={whole}")
    killed = trainer(*words, f"output={run}", env={"TRAINER_FAULT": "kill@0:31"})
    assert killed.returncode != 0
    assert [row["step"] for row in rows(run / "epochs.csv")] == ["14", "28"]
    ok(*words, f"output={run}", "resume=auto", "task.metrics=[auroc,ece,top3]")
    table = rows(run / "epochs.csv")
    expected = rows(whole / "epochs.csv")
    assert len(table) == len(expected) == 3
    for ours, theirs in zip(table, expected, strict=True):
        for key in ("epoch", "step", "train_loss", "lr", "val_loss", "val_auroc", "val_ece"):
            assert ours[key] == theirs[key], key
    assert [row["val_f1_macro"] != "" for row in table] == [True, False, False]
    assert [row["val_top3"] != "" for row in table] == [False, True, True]
    logged = {row["step"]: row for row in steps(whole)}
    for row, evaluation in zip(expected, result(whole)["validation"], strict=True):
        assert float(row["lr"]) == float(logged[row["step"]]["lr"])
        assert float(row["train_loss"]) == evaluation["train_loss"]
        for name in ("loss", "top1", "auroc"):
            assert float(row[f"val_{name}"]) == evaluation[name]
    for folder in (run, whole):
        aurocs = [float(row["val_auroc"]) for row in table]
        assert result(folder)["best_auroc"] == max(aurocs)
        assert result(folder)["best_epoch"] == 1 + aurocs.index(max(aurocs))
    words = [*latest(*words, "epochs=4", "task.metric=mcc"), "schedule.restart=true"]
    refused = trainer(*words, f"output={run}", "resume=auto")
    assert refused.returncode == 2 and "task.metric=auroc" in refused.stderr


def test_an_evaluation_within_an_epoch_is_dropped_if_the_epoch_goes_on(tmp_path):
    """max_steps has ended the run in the middle of its second epoch."""
    words = ["recipe=digits", "model.name=mlp", "epochs=2", "mode=single", "threads=1", *QUIET]
    words += ["schedule.name=constant", f"output={tmp_path / 'run'}"]
    ok(*words, "max_steps=20")
    assert [row["step"] for row in rows(tmp_path / "run" / "epochs.csv")] == ["14", "20"]
    ok(*words, "resume=auto")
    assert [row["step"] for row in rows(tmp_path / "run" / "epochs.csv")] == ["14", "28"]
    assert [row["step"] for row in result(tmp_path / "run")["validation"]] == [14, 28]


@pytest.mark.slow
def test_an_evaluation_is_dropped_if_its_step_is_the_first_of_the_epoch_in_another_mode(tmp_path):
    """One of several steps of an epoch of the workers rounds down to none of one."""
    words = ["data.name=synthetic", "data.samples=191", "data.val_samples=30", "data.image_size=8"]
    words += ["model.name=mlp", "batch_size=96", "epochs=1", "schedule.name=constant", *QUIET]
    words += ["threads=1", f"output={tmp_path / 'run'}"]
    ok(*words, "mode=local_sgd", "nproc=3", "max_steps=1")
    ok(*words, "mode=single", "resume=auto")
    assert [row["step"] for row in rows(tmp_path / "run" / "epochs.csv")] == ["2"]
    assert [row["step"] for row in result(tmp_path / "run")["validation"]] == [2]

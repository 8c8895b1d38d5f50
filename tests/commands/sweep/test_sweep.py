"""The command `sweep` over lists: runs, tables, resuming.

Most tests have a stand-in for the runs' processes, and some use the command line.
"""

import csv
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.checks import odd
from tests.command_line import BARE, ok, result, suggested_commands
from trainer.commands import sweep
from trainer.commands.compare.ranking import NO_DIFFERENCE
from trainer.commands.sweep.results import TrialFigures
from trainer.errors import FolderInUseError, RecipeError
from trainer.launch import launching
from trainer.recipe import load
from trainer.tasks.classification import Classification

RATES = "optimizer.lr=[0.01,0.1,1]"


def swept(*words, code=0, folder=None):
    assert sweep.command(["recipe=digits", *words]) == code
    folder = folder or ("out" if "output=out" in words else "runs/sweep-digits")
    return json.loads(Path(folder, "sweep.json").read_text())


def test_every_combination_runs_once_as_many_at_a_time_as_there_are_cores(machine, capsys):
    report = swept(RATES, "batch_size=[32,64]", "epochs=3")
    assert any("repeats=3" in line for line in report["conclusion"]), "one seed shows no difference"
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        last
        == "python -m trainer recipe=digits epochs=3 mode=single optimizer.lr=0.1 batch_size=32"
    )
    assert shlex.split(last) == report["best"]
    assert Path("runs/sweep-digits/sweep.png").stat().st_size > 5000
    pairs = [
        f"optimizer.lr={rate}-batch_size={size}"
        for rate in ("0.01", "0.1", "1")
        for size in (32, 64)
    ]
    assert machine.ran == [f"{number:03d}-{pair}" for number, pair in enumerate(pairs, 1)]
    words = machine.words[0]
    most = machine.most
    assert (
        words["mode"],
        words["threads"],
        words["devices"],
        most,
    ) == ("single", "1", "[cpu]", 2)
    assert [row["trial"] for row in report["trials"]][:2] == [3, 4]
    assert report["status"] == "completed"
    for row in report["trials"]:
        # JSON turned these keys into texts.
        row["runs"] = {int(seed): value for seed, value in row["runs"].items()}
        assert odd(row, TrialFigures) == []


def test_the_winning_command_has_one_device_of_those_that_the_sweep_had(machine):
    words = swept(RATES, "devices=[cpu,cpu]", "threads=1")["best"][3:]
    assert words == ["recipe=digits", "devices=[cpu]", "mode=single", "optimizer.lr=0.1"]
    assert launching.launch_to_start(load(None, *words[1:])) is None


def test_the_tables(machine, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    swept(RATES, "output=out")
    with (tmp_path / "out/sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["optimizer.lr"] for row in rows] == ["0.1", "0.01", "1"]
    assert float(rows[0]["value"]) == pytest.approx(0.9)
    assert rows[0]["folder"] == "out/002-optimizer.lr=0.1"
    page = (tmp_path / "out/sweep.md").read_text()
    assert "| **2** | **0.1** | **90.00%** |" in page
    assert "python -m trainer sweep recipe=digits" in page
    (bold,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("\033[1m")]
    assert "90.00%" in bold


def test_repeats_have_a_seed_each_and_say_what_chance_does(machine):
    machine.score = lambda words: (
        {"0.01": 0.5, "0.1": 0.9, "1": 0.899}[words["optimizer.lr"]] + noise(words)
    )
    report = swept(RATES, "repeats=3", "seed=5")
    assert machine.ran[3:5] == ["001-optimizer.lr=0.01-seed=6", "002-optimizer.lr=0.1-seed=6"]
    assert [words["seed"] for words in machine.words] == ["5"] * 3 + ["6"] * 3 + ["7"] * 3
    best, alike, worse = report["trials"]
    assert (best["trial"], best["compared"], alike["compared"]) == (2, None, NO_DIFFERENCE)
    assert worse["compared"] == "worse" and best["std"] > 0
    assert any(re.search(r"\btrial 2 .*\b1 of 2 others;", line) for line in report["conclusion"])


def noise(words):
    """The best and the next scatter more than they differ."""
    return 0.004 * (int(words["seed"]) * (1 + (words["optimizer.lr"] == "1")) % 3)


def test_folds_are_runs_of_each_combination(machine, capsys):
    """The table has the mean over the folds, and the standard deviation of a sample."""
    scores = {"0.01": [0.5, 0.6, 0.4], "0.1": [0.9, 0.8, 0.85]}

    def score(words):
        return scores[words["optimizer.lr"]][int(words["data.fold"][0]) - 1]

    machine.score = score
    report = swept("optimizer.lr=[0.01,0.1]", "data.fold=[1/3,2/3,3/3]")
    assert machine.ran == [
        f"{trial:03d}-optimizer.lr={rate}-data.fold={fold}-3"
        for fold in (1, 2, 3)
        for trial, rate in ((1, "0.01"), (2, "0.1"))
    ]
    assert [row["trial"] for row in report["trials"]] == [2, 1]
    for row in report["trials"]:
        expected = scores[row["values"]["optimizer.lr"]]
        assert row["runs"] == dict(zip(("1/3", "2/3", "3/3"), expected, strict=True))
        assert row["value"] == pytest.approx(np.mean(expected))
        assert row["std"] == pytest.approx(np.std(expected, ddof=1))
        assert row["compared"] is None, "folds share images, so nothing is claimed"
    assert (report["keys"], report["folds"]) == (["optimizer.lr"], ["1/3", "2/3", "3/3"])
    assert "85.00% +- 5.00" in capsys.readouterr().out
    assert "85.00% +- 5.00" in Path("runs/sweep-digits/sweep.md").read_text()
    assert not any(word.startswith("data.fold") for word in report["best"])
    machine.ran.clear()
    swept("optimizer.lr=[0.01,0.1]", "data.fold=[1/3,2/3,3/3]")
    assert not machine.ran
    report = swept("optimizer.lr=[0.01,0.1]", "data.fold=[1/3,2/3,3/3]", "repeats=2")
    assert len(machine.ran) == 6 and len(report["trials"][0]["runs"]) == 6


def test_folds_alone_are_one_trial(machine):
    machine.score = lambda words: 0.5 + int(words["data.fold"][0]) / 10
    (row,) = (report := swept("data.fold=[1/2,2/2]", "output=out"))["trials"]
    assert (row["value"], report["keys"]) == (pytest.approx(0.65), [])
    assert row["std"] == pytest.approx(0.1 / 2**0.5)
    with pytest.raises(FolderInUseError, match="other swept"):
        swept("data.fold=[1/3,2/3]", "output=out")
    for folds, says in (("[1/2,1/3]", r"\[1/3,2/3,3/3\]"), ("[1/2,3/2]", "3/2"), ("[1/2]", "one")):
        with pytest.raises(RecipeError, match=says):
            swept(f"data.fold={folds}", "output=other")


def test_a_metric_may_be_minimized(machine, monkeypatch):
    machine.score = lambda words: (
        {
            "0.01": 0.5,
            "0.1": 0.1,
            "1": 0.3,
        }[words["optimizer.lr"]]
        + noise(words) / 100
    )
    monkeypatch.setattr(Classification, "larger_is_better", False)
    report = swept(RATES, "repeats=3", "seed=5")
    assert [row["trial"] for row in report["trials"]] == [2, 3, 1]
    assert [row["compared"] for row in report["trials"]] == [None, "worse", "worse"]


@pytest.mark.slow
def test_failed_trials_are_rows_and_are_repeated_unless_the_loss_was_not_finite(machine):
    machine.faults = {"001": 5, "002": 6}
    good, other, bad = (report := swept(RATES, "output=out"))["trials"]
    assert (bad["trial"], bad["status"], bad["exit_code"], bad["error"]) == (
        2,
        "failed",
        6,
        "broken single",
    )
    assert (good["status"], other["exit_code"]) == ("done", 5)
    assert "2 trials failed" in report["conclusion"]
    machine.faults.clear()
    machine.ran.clear()
    # The user may change these.
    report = swept(RATES, "threads=2", "logging.every_steps=1", "save.keep=3", "output=out")
    assert machine.ran == ["002-optimizer.lr=0.1"]
    assert [row["status"] for row in report["trials"]] == ["done", "done", "failed"]
    machine.ran.clear()
    report = swept(RATES, "repeats=2", "output=out")
    assert [name[-6:] for name in machine.ran] == ["seed=1"] * 2
    assert report["repeats"] == 2
    machine.faults = {"001": 6, "002": 5, "003": 5}
    assert swept(RATES, code=6)["best"] is None, "the exit code is the first trial's"


@pytest.mark.slow
def test_arguments_that_change_results_make_another_sweep(machine):
    swept(RATES, "output=out")
    for word in ("data.root=elsewhere", "mode=local_sgd", "stop.patience=2", "seed=1", "epochs=3"):
        with pytest.raises(FolderInUseError, match=f"other {word.partition('=')[0]}") as caught:
            swept(RATES, word, "output=out")
    (line,) = suggested_commands(str(caught.value))
    machine.ran.clear()
    assert sweep.command(shlex.split(line)[4:]) == 0 and not machine.ran
    with pytest.raises(FolderInUseError, match=r"other swept.*choose another output="):
        swept("optimizer.lr=[0.1,0.2]", "output=out")


@pytest.mark.slow
def test_arguments_are_read_as_they_are_typed(tmp_path):
    """Trials are ordinary runs, a loss that is not finite is a row, and the winning
    command runs.
    """
    words = [
        "optimizer.lr=[0.1,1e30]",
        "optimizer.nesterov=false",
        "model.name=mlp",
        "epochs=1",
        "max_steps=4",
    ]
    completed = ok("sweep", "recipe=digits", *words, *BARE, cwd=tmp_path)
    folder = tmp_path / "runs/sweep-digits"
    report = json.loads((folder / "sweep.json").read_text())
    good, bad = report["trials"]
    assert (good["status"], bad["status"], bad["exit_code"]) == ("done", "failed", 5), report
    run = result(tmp_path / good["folders"][0])
    assert run["best_top1"] == good["value"] and run["mode"] == "single"
    listed = ok("runs", cwd=tmp_path).stdout
    assert "sweep-digits/001-optimizer.lr=0.1" in listed and "completed" in listed
    last = completed.stdout.splitlines()[-1]
    assert last.startswith("python -m trainer recipe=digits")
    ok(*shlex.split(last)[3:], "output=again", "threads=1", cwd=tmp_path)
    assert result(tmp_path / "again")["best_top1"] == good["value"]


@pytest.mark.slow
def test_speeds_are_measured_one_at_a_time_and_drawn_over_their_key(machine, tmp_path):
    """The curve of a pipeline's micro-batches."""
    words = [
        "mode=pipeline",
        "nproc=2",
        "pipeline.split_size=[8,16,32]",
        "max_steps=40",
        "metric=speed",
        "repeats=2",
    ]
    report = swept(*words, "output=out")
    assert len(machine.ran) == 6
    assert machine.words[0]["nproc"] == "2" and machine.words[0]["save.every_epochs"] == "null"
    assert report["metric"] == "images/s"
    assert report["trials"][0]["value"] == pytest.approx(1010, rel=0.02)
    assert all(row["compared"] in (None, NO_DIFFERENCE) for row in report["trials"]), (
        "they differ by chance"
    )
    assert (tmp_path / "out/sweep.png").stat().st_size > 5000
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    machine.ran.clear()
    swept(*words, "output=out")
    assert not machine.ran
    with pytest.raises(FolderInUseError, match="other metric"):
        swept(*words[:4], "repeats=2", "output=out")
    machine.most = 0
    swept("mode=single", "batch_size=[32,64]", "metric=speed", "output=alone", folder="alone")
    assert machine.most == 1 and machine.words[-1]["threads"] == "2"
    machine.timed = False
    assert (
        "too short"
        in swept(
            *words,
            "output=short",
            code=2,
            folder="short",
        )["trials"][0]["error"]
    )


def test_the_table_names_the_images_of_the_metric(machine, capsys):
    swept(RATES, "output=out")
    assert "test" not in capsys.readouterr().out
    assert sweep.command(["recipe=mnist", RATES, "output=mnist"]) == 0
    lines = json.loads(Path("mnist/sweep.json").read_text())["conclusion"]
    assert "test images" in lines[0] and "optimistic" in lines[1]

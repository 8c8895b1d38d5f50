"""Requests of a callback, in every mode: its own figures, and the end of the run."""

import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.command_line import losses, result, written
from tests.command_line import steps as read_steps
from trainer import EpochReport, train
from trainer.errors import Preempted, RecipeError
from trainer.recipe import TRAITS
from trainer.saving.steps_file import read_table
from trainer.training.callbacks import Callbacks

pytestmark = pytest.mark.usefixtures("warm_commands")
WORDS = {
    "recipe": "digits",
    "model__name": "cnn_gn",
    "batch_size": 400,
    "optimizer__lr": 0.02,
    "epochs": 3,
    "schedule__warmup_epochs": 0,
    "devices": ["cpu"],
    "threads": 1,
    "logging__every_steps": 1,
    "logging__verdict": False,
    "logging__progress": False,
}


def decide(report):
    report.log("accuracy", np.float32(report.metrics["top1"]))
    report.log("mine/step", torch.tensor(report.step))
    return report.epoch < 2


MODES = {
    mode: {"mode": mode, "nproc": 2} for mode, traits in TRAITS.items() if traits.processes != "one"
}
MODES["streams"] = {"mode": "pipeline", "devices": ["cpu", "cpu"], "pipeline__schedule": "streams"}
MODES["pipeline"]["pipeline__microbatches"] = 2


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single") / "run"
    train(**WORDS, on_epoch=decide, mode="single", output=folder)
    return folder


def test_a_callback_logs_and_ends_the_run(single):
    run_result = result(single)
    assert run_result["logged"] == {
        "mine/step": 6,
        "accuracy": pytest.approx(run_result["val_top1"]),
    }
    at = [(f"logged/{name}", step) for name in ("accuracy", "mine/step") for step in (3, 6)]
    assert [value for value in written(single) if value[0].startswith("logged/")] == at
    assert (run_result["epochs"], run_result["ended_by"]) == (2, "callback")


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=[pytest.mark.full] * (m != "ddp")) for m in MODES]
)
def test_a_callback_works_in_every_mode(single, tmp_path, mode):
    folder = tmp_path / "run"
    train(**{**WORDS, **MODES[mode]}, on_epoch=decide, output=folder)
    assert result(folder)["logged"].keys() == result(single)["logged"].keys()
    assert result(folder)["epochs"] == 2
    if TRAITS.get(mode, TRAITS["single"]).same_maths:
        assert losses(folder) == pytest.approx(losses(single), rel=1e-5)


def report_of():
    return EpochReport(1, 2, 1, 0.5, {}, True, 1.0)


def test_invalid_requests_are_one_sentence():
    kept = []
    report = report_of()
    alone = SimpleNamespace(is_main=True, wait_for=lambda value: [value])
    for name in ("", "a b", 3):
        with pytest.raises(RecipeError, match=r"log.*\bname\b"):
            report.log(name, 1.0)
    for value in ("high", [1.0, 2.0], torch.zeros(2)):
        with pytest.raises(RecipeError, match=r"log.*\bvalue\b"):
            report.log("mine", value)
    assert Callbacks(on_epoch=kept.append).report(alone, "on_epoch", report).go_on
    with pytest.raises(RecipeError, match="later"):
        kept[0].log("mine", 1.0)
    assert report == report_of()


def test_all_ranks_get_the_answer_of_rank_0():
    message = report_of()
    sent = []
    message.log("mine", 2)
    main = SimpleNamespace(is_main=True, wait_for=lambda value: sent.append(value) or sent)
    here = Callbacks(on_epoch=lambda report: None).report(main, "on_epoch", message)
    rank = SimpleNamespace(is_main=False, wait_for=lambda value: [*sent, value])
    assert (
        Callbacks(on_epoch=lambda report: pytest.fail("only rank 0 calls it")).report(
            rank, "on_epoch", report_of()
        )
        == here
    )
    assert (here.go_on, here.logged) == (True, {"mine": 2.0})


@pytest.mark.parametrize("mode", ["ddp", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_a_callback_may_last_longer_than_the_timeout(tmp_path, mode):
    """The callback runs on rank 0, and the other ranks wait."""
    words = {
        **WORDS,
        **MODES[mode],
        "epochs": 1,
        "timeout": 1.0,
        "output": tmp_path / "run",
    }
    train(**words, on_epoch=lambda report: time.sleep(2.5))
    assert result(tmp_path / "run")["status"] == "completed"


def test_callbacks_of_steps_and_evaluations_see_every_one_and_can_end_the_run(tmp_path):
    steps = []
    evaluations = []

    def on_step(report):
        steps.append((report.epoch, report.step, report.loss, report.lr))
        report.log("seen", report.step)
        return report.step < 5

    def on_evaluation(report):
        evaluations.append((report.epoch, report.step, report.metrics["loss"], report.best))

    run_result = train(
        **WORDS,
        mode="single",
        output=tmp_path / "run",
        evaluate__every_steps=2,
        on_step=on_step,
        on_evaluation=on_evaluation,
    )
    rows = [row for row in read_steps(tmp_path / "run")]
    assert [(int(row["epoch"]), int(row["step"])) for row in rows] == [
        (epoch, step) for epoch, step, _, _ in steps
    ]
    losses_of_rows = [float(row["train_loss"]) for row in rows]
    assert losses_of_rows == pytest.approx([row[2] for row in steps])
    rates = [float(row["lr"]) for row in rows]
    assert rates == pytest.approx([row[3] for row in steps])
    places = [row[:2] for row in evaluations]
    assert places == [(1, 2), (1, 3), (2, 4), (2, 5)]
    assert evaluations[-1][2] == run_result["val_loss"]
    assert evaluations[0][3] is True
    assert (run_result["steps"], run_result["ended_by"]) == (5, "callback")
    assert run_result["logged"] == {"seen": 5}


@pytest.mark.slow
def test_a_callback_of_steps_ends_all_ranks_at_the_same_step(tmp_path):
    run_result = train(
        **WORDS, **MODES["ddp"], output=tmp_path / "run", on_step=lambda report: report.step < 4
    )
    assert (run_result["steps"], run_result["ended_by"]) == (4, "callback")


def test_a_callback_that_is_no_function_is_refused_by_name():
    with pytest.raises(RecipeError, match=r"^on_step= "):
        train(**WORDS, on_step=3)


def test_an_evaluation_that_ends_the_run_within_an_epoch_has_one_row(tmp_path):
    """The step is not one of `logging.every_steps`, and no epoch has ended before it."""
    words = {**WORDS, "logging__every_steps": 100, "epochs": 2}
    reports = []

    def on_evaluation(report):
        reports.append(report.step)
        return False

    run_result = train(
        **words,
        mode="single",
        output=tmp_path / "run",
        evaluate__every_steps=2,
        on_evaluation=on_evaluation,
    )
    assert (run_result["steps"], run_result["ended_by"], reports) == (2, "callback", [2])
    _, rows, _ = read_table(tmp_path / "run" / "epochs.csv", ())
    assert [row["step"] for row in rows] == ["2"]
    assert [row["step"] for row in run_result["validation"]] == [2]
    assert run_result["losses"] == [pytest.approx(float(rows[0]["train_loss"]))]
    assert run_result["losses"][0] == run_result["train_loss"]


def test_an_end_that_a_callback_asks_for_outlives_a_signal(tmp_path):
    def end(report):
        if report.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return report.step < 2

    words = {**WORDS, "batch_size": 64, "mode": "single", "output": str(tmp_path / "run")}
    with pytest.raises(Preempted):
        train(**words, on_step=end)
    assert result(tmp_path / "run")["validation"] == []
    resumed = train(**words, resume="auto")
    assert (resumed["steps"], resumed["ended_by"]) == (2, "callback")

"""What callbacks ask for: figures of their own and another learning rate, in every mode and after a stop."""

import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.command_line import digest, losses, result, steps
from tests.telemetry.event_values import written
from trainer import EpochReport, StepReport, train
from trainer.errors import Interrupted, RecipeError
from trainer.training.callbacks import Callbacks

pytestmark = pytest.mark.usefixtures("warm_commands")
WORDS = {
    "recipe": "digits", "model__name": "cnn_gn", "batch_size": 400, "optimizer__lr": 0.02, "epochs": 3,
    "schedule__warmup_epochs": 0, "devices": ["cpu"], "threads": 1, "logging__every_steps": 1,
    "logging__verdict": False, "logging__progress": False,
}  # fmt: skip
SCALED = [1, 1, 0.5, 0.5, 0.5, 0.5, 0.05, 0.05, 0.05]  # of the schedule, at each step


def halve(report):
    report.log("mine/step", torch.tensor(report.step))
    if report.step == 2:
        report.scale_lr(0.5)


def tenth(report):
    report.log("accuracy", np.float32(report.metrics["top1"]))
    if report.epoch == 2:
        report.scale_lr(0.1)


CALLS = {"on_step": halve, "on_epoch": tenth}
MODES = {
    "ddp": {"mode": "ddp", "nproc": 2},
    "pipeline": {"mode": "pipeline", "nproc": 2, "pipeline__microbatches": 2},
    "fsdp": {"mode": "fsdp", "nproc": 2},
    "streams": {"mode": "pipeline", "devices": ["cpu", "cpu"], "pipeline__schedule": "streams"},
    "local_sgd": {"mode": "local_sgd", "nproc": 2},
    "hogwild": {"mode": "hogwild", "nproc": 2},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """mode=single without callbacks."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    train(**WORDS, mode="single", output=folder)
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """mode=single with them."""
    folder = tmp_path_factory.mktemp("single") / "run"
    train(**WORDS, **CALLS, mode="single", output=folder)
    return folder


def rates(folder):
    return [float(row["lr"]) for row in steps(folder)]


def test_a_callback_logs_and_changes_the_learning_rate(plain, single):
    assert rates(single) == pytest.approx([rate * factor for rate, factor in zip(rates(plain), SCALED, strict=True)])
    found = result(single)
    assert found["logged"] == {"mine/step": 9, "accuracy": pytest.approx(found["val_top1"])}
    assert result(plain)["logged"] == {}
    at = [("logged/accuracy", step) for step in (3, 6, 9)] + [("logged/mine/step", step) for step in range(1, 10)]
    assert [value for value in written(single) if value[0].startswith("logged/")] == at
    assert result(single)["losses"][1] > result(plain)["losses"][1]


@pytest.mark.parametrize("mode", MODES)
def test_it_does_in_every_mode(single, tmp_path, mode):
    folder = tmp_path / "run"
    train(**{**WORDS, **MODES[mode]}, **CALLS, output=folder)
    names = result(folder)["logged"].keys()
    assert names == result(single)["logged"].keys()
    if mode not in ("local_sgd", "hogwild"):  # other maths, and another number of steps
        assert rates(folder) == rates(single)
        assert losses(folder) == pytest.approx(losses(single), rel=1e-5)
    assert rates(folder)[2] < 0.6 * rates(folder)[1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{"mode": "single"}, pytest.param(MODES["ddp"], marks=pytest.mark.full("four ranks"))])
@pytest.mark.parametrize("at", [4, 7])
def test_a_run_that_was_stopped_goes_on_with_what_they_asked_for(tmp_path, capsys, mode, at):
    caller = os.getpid()

    def interrupted(report):
        halve(report)
        if report.step == at:
            os.kill(caller, signal.SIGINT)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = {**WORDS, **mode}
    train(**words, **CALLS, output=whole)
    with pytest.raises(Interrupted):
        train(**words, on_step=interrupted, on_epoch=tenth, output=parts)
    train(**words, **CALLS, output=parts, resume="auto")
    assert rates(parts) == rates(whole)
    assert digest(parts / "last.safetensors") == digest(whole / "last.safetensors")
    assert result(parts)["logged"] == result(whole)["logged"]
    assert f"learning rate: {0.5 if at == 4 else 0.05} times" in capsys.readouterr().out or mode != {"mode": "single"}


def test_a_run_that_goes_on_without_its_callbacks_keeps_the_rate(single, tmp_path):
    folder = tmp_path / "run"

    def stop(report):
        tenth(report)
        if report.epoch == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(**WORDS, mode="single", on_step=halve, on_epoch=stop, output=folder)
    train(**WORDS, mode="single", output=folder, resume="auto")
    assert rates(folder) == rates(single)


def test_what_cannot_be_asked_for_is_a_sentence():
    kept = []
    calls = Callbacks(on_step=kept.append)
    alone = SimpleNamespace(is_main=True, broadcast_object=lambda value: value)
    report = StepReport(1, 2, 1, 0.5, 0.1, None)
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(RecipeError, match=r"scale_lr.*above 0"):
            report.scale_lr(wrong)
    for name in ("", "a b", 3):
        with pytest.raises(RecipeError, match=r"log.*\bname\b"):
            report.log(name, 1.0)
    for value in ("high", [1.0, 2.0], torch.zeros(2)):
        with pytest.raises(RecipeError, match=r"log.*\bvalue\b"):
            report.log("mine", value)
    report.scale_lr(0.5)
    report.scale_lr(0.5)
    assert calls.report(alone, report).lr_factor == 0.25
    for late in (lambda: kept[0].log("mine", 1.0), lambda: kept[0].scale_lr(0.5)):
        with pytest.raises(RecipeError, match="later"):
            late()
    assert report == StepReport(1, 2, 1, 0.5, 0.1, None)


def test_a_figure_that_is_none_is_null_in_result_json(tmp_path):
    words = {**WORDS, "mode": "single", "model__name": "mlp", "epochs": 1}
    train(**words, output=tmp_path / "run", on_epoch=lambda report: report.log("mine", float("nan")))
    assert result(tmp_path / "run")["logged"] == {"mine": None}


def test_all_ranks_hear_what_rank_0_is_told():
    told = EpochReport(1, 2, 1, 0.5, {}, True, 1.0)
    told.log("mine", 2)
    told.scale_lr(0.5)
    sent = []
    main = SimpleNamespace(is_main=True, broadcast_object=lambda value: (sent.append(value), value)[1])
    here = Callbacks(on_epoch=lambda report: None).report(main, told)
    other = Callbacks(on_epoch=lambda report: pytest.fail("only rank 0 calls it"))
    rank = SimpleNamespace(is_main=False, broadcast_object=lambda _: sent[0])
    assert other.report(rank, EpochReport(1, 2, 1, 0.5, {}, True, 1.0)) == here
    assert (here.go_on, here.logged, here.lr_factor) == (True, {"mine": 2.0}, 0.5)

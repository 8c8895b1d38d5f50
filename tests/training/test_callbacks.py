"""What a callback asks for: figures of its own and another learning rate, in every mode and after a stop."""

import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.command_line import losses, result, steps
from tests.telemetry.event_values import written
from trainer import EpochReport, train
from trainer.errors import Interrupted, RecipeError
from trainer.training.callbacks import Callbacks

pytestmark = pytest.mark.usefixtures("warm_commands")
WORDS = {
    "recipe": "digits", "model__name": "cnn_gn", "batch_size": 400, "optimizer__lr": 0.02, "epochs": 3,
    "schedule__warmup_epochs": 0, "devices": ["cpu"], "threads": 1, "logging__every_steps": 1,
    "logging__verdict": False, "logging__progress": False,
}  # fmt: skip
SCALED = [1, 1, 1, 0.5, 0.5, 0.5, 0.05, 0.05, 0.05]  # of the schedule, at each step


def decide(report):
    report.log("accuracy", np.float32(report.metrics["top1"]))
    report.log("mine/step", torch.tensor(report.step))
    report.scale_lr(0.5 if report.epoch == 1 else 0.1)


MODES = {
    "ddp": {"mode": "ddp", "nproc": 2},
    "streams": {"mode": "pipeline", "devices": ["cpu", "cpu"], "pipeline__schedule": "streams"},
    "local_sgd": {"mode": "local_sgd", "nproc": 2},
    "pipeline": {"mode": "pipeline", "nproc": 2, "pipeline__microbatches": 2},
    "fsdp": {"mode": "fsdp", "nproc": 2},
    "hogwild": {"mode": "hogwild", "nproc": 2},
}
FAST = ("ddp", "streams")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """mode=single without a callback."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    train(**WORDS, mode="single", output=folder)
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """mode=single with it."""
    folder = tmp_path_factory.mktemp("single") / "run"
    train(**WORDS, on_epoch=decide, mode="single", output=folder)
    return folder


def rates(folder):
    return [float(row["lr"]) for row in steps(folder)]


def test_a_callback_logs_and_changes_the_learning_rate(plain, single):
    assert rates(single) == pytest.approx([rate * factor for rate, factor in zip(rates(plain), SCALED, strict=True)])
    found = result(single)
    assert found["logged"] == {"mine/step": 9, "accuracy": pytest.approx(found["val_top1"])}
    assert result(plain)["logged"] == {}
    at = [(f"logged/{name}", step) for name in ("accuracy", "mine/step") for step in (3, 6, 9)]
    assert [value for value in written(single) if value[0].startswith("logged/")] == at


@pytest.mark.parametrize("mode", [m if m in FAST else pytest.param(m, marks=pytest.mark.full) for m in MODES])
def test_it_does_in_every_mode(single, tmp_path, mode):
    folder = tmp_path / "run"
    train(**{**WORDS, **MODES[mode]}, on_epoch=decide, output=folder)
    assert result(folder)["logged"].keys() == result(single)["logged"].keys()
    if mode not in ("local_sgd", "hogwild"):  # other maths, and another number of steps
        assert rates(folder) == rates(single)
        assert losses(folder) == pytest.approx(losses(single), rel=1e-5)
    assert rates(folder)[4] < 0.6 * rates(folder)[2]


def test_a_run_that_goes_on_without_its_callback_keeps_the_rate(single, tmp_path):
    folder = tmp_path / "run"

    def stop(report):
        decide(report)
        if report.epoch == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(**WORDS, mode="single", on_epoch=stop, output=folder)
    train(**WORDS, mode="single", output=folder, resume="auto")
    assert rates(folder) == rates(single)


def report_of():
    return EpochReport(1, 2, 1, 0.5, {}, True, 1.0)


def test_what_cannot_be_asked_for_is_a_sentence():
    kept, report = [], report_of()
    alone = SimpleNamespace(is_main=True, broadcast_object=lambda value: value)
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
    assert Callbacks(kept.append).report(alone, report).lr_factor == 0.25
    for late in (lambda: kept[0].log("mine", 1.0), lambda: kept[0].scale_lr(0.5)):
        with pytest.raises(RecipeError, match="later"):
            late()
    assert report == report_of()


def test_all_ranks_hear_what_rank_0_is_told():
    told, sent = report_of(), []
    told.log("mine", 2)
    told.scale_lr(0.5)
    main = SimpleNamespace(is_main=True, broadcast_object=lambda value: (sent.append(value), value)[1])
    here = Callbacks(lambda report: None).report(main, told)
    rank = SimpleNamespace(is_main=False, broadcast_object=lambda _: sent[0])
    assert Callbacks(lambda report: pytest.fail("only rank 0 calls it")).report(rank, report_of()) == here
    assert (here.go_on, here.logged, here.lr_factor) == (True, {"mine": 2.0}, 0.5)

"""What a callback asks for, in every mode: figures of its own, and the end of the run."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.command_line import losses, result
from tests.telemetry.event_values import written
from trainer import EpochReport, train
from trainer.errors import RecipeError
from trainer.training.callbacks import Callbacks

pytestmark = pytest.mark.usefixtures("warm_commands")
WORDS = {
    "recipe": "digits", "model__name": "cnn_gn", "batch_size": 400, "optimizer__lr": 0.02, "epochs": 3,
    "schedule__warmup_epochs": 0, "devices": ["cpu"], "threads": 1, "logging__every_steps": 1,
    "logging__verdict": False, "logging__progress": False,
}  # fmt: skip


def decide(report):
    report.log("accuracy", np.float32(report.metrics["top1"]))
    report.log("mine/step", torch.tensor(report.step))
    return report.epoch < 2


MODES = {mode: {"mode": mode, "nproc": 2} for mode in ("ddp", "local_sgd", "pipeline", "fsdp", "hogwild")}
MODES["streams"] = {"mode": "pipeline", "devices": ["cpu", "cpu"], "pipeline__schedule": "streams"}
MODES["pipeline"]["pipeline__microbatches"] = 2


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single") / "run"
    train(**WORDS, on_epoch=decide, mode="single", output=folder)
    return folder


def test_a_callback_logs_and_ends_the_run(single):
    found = result(single)
    assert found["logged"] == {"mine/step": 6, "accuracy": pytest.approx(found["val_top1"])}
    at = [(f"logged/{name}", step) for name in ("accuracy", "mine/step") for step in (3, 6)]
    assert [value for value in written(single) if value[0].startswith("logged/")] == at
    assert (found["epochs"], found["ended_by"]) == (2, "callback")


@pytest.mark.parametrize("mode", [pytest.param(m, marks=[pytest.mark.full] * (m != "ddp")) for m in MODES])
def test_it_does_in_every_mode(single, tmp_path, mode):
    folder = tmp_path / "run"
    train(**{**WORDS, **MODES[mode]}, on_epoch=decide, output=folder)
    assert result(folder)["logged"].keys() == result(single)["logged"].keys()
    assert result(folder)["epochs"] == 2
    if mode not in ("local_sgd", "hogwild"):  # other maths
        assert losses(folder) == pytest.approx(losses(single), rel=1e-5)


def report_of():
    return EpochReport(1, 2, 1, 0.5, {}, True, 1.0)


def test_what_cannot_be_asked_for_is_a_sentence():
    kept, report = [], report_of()
    alone = SimpleNamespace(is_main=True, broadcast_object=lambda value: value)
    for name in ("", "a b", 3):
        with pytest.raises(RecipeError, match=r"log.*\bname\b"):
            report.log(name, 1.0)
    for value in ("high", [1.0, 2.0], torch.zeros(2)):
        with pytest.raises(RecipeError, match=r"log.*\bvalue\b"):
            report.log("mine", value)
    assert Callbacks(kept.append).report(alone, report).go_on
    with pytest.raises(RecipeError, match="later"):
        kept[0].log("mine", 1.0)
    assert report == report_of()


def test_all_ranks_hear_what_rank_0_is_told():
    told, sent = report_of(), []
    told.log("mine", 2)
    main = SimpleNamespace(is_main=True, broadcast_object=lambda value: (sent.append(value), value)[1])
    here = Callbacks(lambda report: None).report(main, told)
    rank = SimpleNamespace(is_main=False, broadcast_object=lambda _: sent[0])
    assert Callbacks(lambda report: pytest.fail("only rank 0 calls it")).report(rank, report_of()) == here
    assert (here.go_on, here.logged) == (True, {"mine": 2.0})

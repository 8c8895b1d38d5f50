"""Predictions from speeds that are made up: more devices, stages, communication."""

import pytest

from tests.commands.plan.plans import fixed_speed, of_cnn
from trainer import plan
from trainer.errors import RecipeError


@pytest.fixture(autouse=True)
def speed(monkeypatch):
    fixed_speed(monkeypatch)


def test_more_devices():
    found = plan(of_cnn("ddp"), nproc=8, measured="here", bandwidth="10MB/s")
    gradients = 4 * found["model"]["parameters"]
    made = found["prediction"]
    assert made["compute_seconds"] == pytest.approx(0.08 / 8)
    assert made["communication_seconds"] == pytest.approx(2 * 7 / 8 * gradients / 10e6)
    assert made["optimizer_seconds"] == made["other_seconds"] == pytest.approx(0.01)
    assert made["step_seconds"] == pytest.approx(
        sum(made[f"{k}_seconds"] for k in ("compute", "communication", "optimizer", "other"))
    )
    assert found["predicted_samples_per_sec"] == pytest.approx(128 / made["step_seconds"])
    assert plan(of_cnn("single"), measured="here")["predicted_samples_per_sec"] == pytest.approx(1280)


def test_compressed_gradients_take_half_the_time():
    made = [
        plan(of_cnn("ddp", word), nproc=2, measured="here", bandwidth="10MB/s")["prediction"]["communication_seconds"]
        for word in ("ddp.compress=bf16", "ddp.compress=null")
    ]
    assert made[1] == pytest.approx(2 * made[0]) and made[0]


def test_a_gpu_hides_communication():
    cards = "devices=[cuda:0,cuda:1]"
    made = plan(of_cnn("ddp", cards), measured="here", bandwidth="1GB/s")["prediction"]
    assert made["communication_seconds"] == 0
    made = plan(of_cnn("ddp", cards), measured="here", bandwidth="10MB/s")["prediction"]
    whole = 4 * 391_466 / 10e6
    assert made["communication_seconds"] == pytest.approx(whole - 2 / 3 * 0.04, rel=1e-3)


def test_stages():
    found = plan(of_cnn("pipeline", "pipeline.microbatches=8"), nproc=2, measured="here", bandwidth="1GB/s")
    made, stages = found["prediction"], found["pipeline"]["stages"]
    slowest = max(stage["flops_share"] for stage in stages)
    assert made["compute_seconds"] > 0.08 * slowest  # its bound
    assert made["compute_seconds"] < 0.08
    split = plan(of_cnn("split", "devices=[cpu,cpu]"), measured="here")["prediction"]
    assert split["compute_seconds"] == pytest.approx(0.08)


@pytest.mark.parametrize("measured", ["runs/first", 3])
def test_only_this_machine_is_measured(measured):
    with pytest.raises(RecipeError, match="measured=here"):
        plan(of_cnn("ddp"), nproc=2, measured=measured)

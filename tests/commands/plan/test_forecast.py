"""Predictions from speeds that are made up: more devices, stages, communication."""

import pytest

from tests.commands.plan.plans import fixed_speed, of_cnn
from trainer import plan


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
    parts = [made[f"{part}_seconds"] for part in ("compute", "communication", "optimizer", "other")]
    assert made["step_seconds"] == pytest.approx(sum(parts))
    assert found["predicted_samples_per_sec"] == pytest.approx(128 / made["step_seconds"])
    assert plan(of_cnn("single"), measured="here")["predicted_samples_per_sec"] == pytest.approx(1280)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("ddp", ["ddp.compress=bf16"]),
        ("local_sgd", ["local_sgd.every=10"]),
        ("fsdp", []),
        ("pipeline", ["pipeline.stages=2", "pipeline.microbatches=8"]),
    ],
)
def test_what_is_sent_is_what_takes_time(mode, words):
    found = plan(of_cnn(mode, *words), nproc=4, measured="here", bandwidth="10MB/s")
    sent = found["communication"]["all_reduce_bytes_per_device"]
    assert sent and found["prediction"]["communication_seconds"] == pytest.approx(sent / 10e6, rel=1e-5)


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

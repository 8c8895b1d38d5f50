"""Predictions from speeds that are made up: more devices, stages, communication."""

import pytest

from tests.commands.plan.plans import cnn_recipe, fixed_speed
from trainer import plan


@pytest.fixture(autouse=True)
def speed(monkeypatch):
    fixed_speed(monkeypatch)


@pytest.mark.slow
def test_more_devices():
    planned = plan(cnn_recipe("ddp"), nproc=8, measured="here", bandwidth="10MB/s")
    gradients = 4 * planned["model"]["parameters"]
    created = planned["prediction"]
    assert created["compute_seconds"] == pytest.approx(0.08 / 8)
    assert created["communication_seconds"] == pytest.approx(2 * 7 / 8 * gradients / 10e6)
    assert created["optimizer_seconds"] == pytest.approx(0.01) and created["other_seconds"] == 0
    parts = [
        created[f"{part}_seconds"] for part in ("compute", "communication", "optimizer", "other")
    ]
    assert created["step_seconds"] == pytest.approx(sum(parts))
    assert planned["predicted_samples_per_sec"] == pytest.approx(128 / created["step_seconds"])
    assert plan(cnn_recipe("single"), measured="here")[
        "predicted_samples_per_sec"
    ] == pytest.approx(128 / 0.09)


@pytest.mark.slow(cases=["pipeline-words3"])
@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("ddp", ["ddp.compress=bf16"]),
        ("local_sgd", ["local_sgd.every=10"]),
        ("fsdp", []),
        ("pipeline", ["pipeline.stages=2", "pipeline.microbatches=8"]),
    ],
)
def test_communication_time_follows_the_bytes_sent(mode, words):
    planned = plan(cnn_recipe(mode, *words), nproc=4, measured="here", bandwidth="10MB/s")
    sent = planned["communication"]["all_reduce_bytes_per_device"]
    assert sent
    assert planned["prediction"]["communication_seconds"] == pytest.approx(sent / 10e6, rel=1e-5)


def test_a_gpu_hides_communication():
    cards = "devices=[cuda:0,cuda:1]"
    created = plan(cnn_recipe("ddp", cards), measured="here", bandwidth="1GB/s")["prediction"]
    assert created["communication_seconds"] == 0
    created = plan(cnn_recipe("ddp", cards), measured="here", bandwidth="10MB/s")["prediction"]
    whole = 4 * 391_466 / 10e6
    assert created["communication_seconds"] == pytest.approx(whole - 2 / 3 * 0.04, rel=1e-3)


@pytest.mark.slow
def test_stages():
    planned = plan(
        cnn_recipe("pipeline", "pipeline.microbatches=8"),
        nproc=2,
        measured="here",
        bandwidth="1GB/s",
    )
    created = planned["prediction"]
    stages = planned["pipeline"]["stages"]
    slowest = max(stage["flops_share"] for stage in stages)
    assert created["compute_seconds"] > 0.08 * slowest  # The bound of the slowest stage.
    assert created["compute_seconds"] < 0.08
    split = plan(cnn_recipe("split", "devices=[cpu,cpu]"), measured="here")["prediction"]
    assert split["compute_seconds"] == pytest.approx(0.08)

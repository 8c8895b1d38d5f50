"""Predictions from runs, made up: more devices, stages, communication."""

import pytest

from tests.commands.plan.plans import of_cnn, run_folder
from trainer import plan


def test_more_devices_from_a_run_of_one(tmp_path):
    folder = run_folder(tmp_path / "run")
    found = plan(of_cnn("ddp"), nproc=8, measured=folder, bandwidth="10MB/s")
    gradients = 4 * found["model"]["parameters"]
    made = found["prediction"]
    assert made["compute_seconds"] == pytest.approx(0.08 / 8)
    assert made["communication_seconds"] == pytest.approx(2 * 7 / 8 * gradients / 10e6)
    assert made["optimizer_seconds"] == made["other_seconds"] == pytest.approx(0.01)
    assert made["step_seconds"] == pytest.approx(
        sum(made[f"{k}_seconds"] for k in ("compute", "communication", "optimizer", "other"))
    )
    assert found["predicted_samples_per_sec"] == pytest.approx(128 / made["step_seconds"])
    assert [row["devices"] for row in found["scaling"]] == [1, 2, 4, 8]
    assert found["scaling"][0]["samples_per_sec"] == pytest.approx(1280)
    assert found["scaling"][-1]["step_seconds"] == pytest.approx(made["step_seconds"])
    assert plan(of_cnn("single"), measured=folder)["predicted_samples_per_sec"] == pytest.approx(1280)


def test_communication_as_it_was_measured(tmp_path):
    step = {"data": 0.0, "compute": 0.7, "communication": 0.3, "bubble": 0.0, "optimizer": 0.0, "logging": 0.0}
    folder = run_folder(tmp_path / "run", "mode=ddp", world_size=2, verdict={"step": step})
    made = plan(of_cnn("ddp"), nproc=8, measured=folder)["prediction"]
    assert made["compute_seconds"] == pytest.approx(0.07 / 4)
    assert made["communication_seconds"] == pytest.approx(0.03 * (7 / 8) / (1 / 2))
    halved = plan(of_cnn("ddp", "ddp.compress=bf16"), nproc=8, measured=folder)["prediction"]
    assert halved["communication_seconds"] == pytest.approx(made["communication_seconds"] / 2)


def test_compressed_gradients_take_half_the_time(tmp_path):
    step = {"data": 0.0, "compute": 0.7, "communication": 0.3, "bubble": 0.0, "optimizer": 0.0, "logging": 0.0}
    words = ["mode=ddp", "ddp.compress=bf16"]
    folder = run_folder(tmp_path / "run", *words, world_size=2, verdict={"step": step})
    seconds = {
        word: plan(of_cnn("ddp", word), nproc=2, measured=folder)["prediction"]["communication_seconds"]
        for word in ("ddp.compress=bf16", "ddp.compress=null")
    }
    assert [*seconds.values()] == pytest.approx([0.03, 0.06])
    stated = plan(of_cnn("ddp", words[1]), nproc=2, measured=folder, bandwidth="10MB/s")
    assert stated["prediction"]["communication_seconds"] == pytest.approx(2 * stated["model"]["parameters"] / 10e6)


def test_a_gpu_hides_communication(tmp_path, monkeypatch):
    folder = run_folder(tmp_path / "run")
    cards = "devices=[cuda:0,cuda:1]"
    made = plan(of_cnn("ddp", cards), measured=folder, bandwidth="1GB/s")["prediction"]
    assert made["communication_seconds"] == 0
    made = plan(of_cnn("ddp", cards), measured=folder, bandwidth="10MB/s")["prediction"]
    whole = 4 * 391_466 / 10e6
    assert made["communication_seconds"] == pytest.approx(whole - 2 / 3 * 0.04, rel=1e-3)


def test_a_pipeline_from_a_run_of_one_device(tmp_path):
    folder = run_folder(tmp_path / "run")
    found = plan(of_cnn("pipeline", "pipeline.microbatches=8"), nproc=2, measured=folder, bandwidth="1GB/s")
    made, stages = found["prediction"], found["pipeline"]["stages"]
    slowest = max(stage["flops_share"] for stage in stages)
    assert made["compute_seconds"] > 0.08 * slowest  # its bound
    assert made["compute_seconds"] < 0.08
    split = plan(of_cnn("split", "devices=[cpu,cpu]"), measured=folder)["prediction"]
    assert split["compute_seconds"] == pytest.approx(0.08)


def test_a_pipeline_from_a_run_of_the_same(tmp_path):
    pipe = {"cuts": ["3"], "microbatches": 8, "split_size": 16, "stage_seconds": [0.04, 0.02]}
    folder = run_folder(tmp_path / "run", "mode=pipeline", world_size=2, pipeline=pipe)
    found = plan(of_cnn("pipeline", "pipeline.cuts=['3']"), nproc=2, measured=folder)
    assert found["pipeline"]["microbatches"] == 8
    # 1F1B: the first stage's 8 micro-batches, and its wait for the first to come back while it does another forward.
    assert found["prediction"]["compute_seconds"] == pytest.approx(0.04 + 0.02 / 8 - 0.04 / 8 / 3)

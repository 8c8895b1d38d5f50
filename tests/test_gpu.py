"""What needs a CUDA device; skipped with a reason where there is none."""

import pytest

from tests.command_line import QUIET, losses, ok, result, trainer

pytestmark = pytest.mark.gpu
GPU = {"CUDA_VISIBLE_DEVICES": "0"}
SAME = ["recipe=digits", "mode=single", "model.name=cnn_gn", "optimizer.lr=0.001", "max_steps=20", *QUIET]


def test_the_losses_of_the_cpu(tmp_path):
    ok(*SAME, f"output={tmp_path / 'cpu'}")
    ok(*SAME, f"output={tmp_path / 'cuda'}", env=GPU)
    assert result(tmp_path / "cuda")["devices"] == ["cuda:0"]
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)
    assert result(tmp_path / "cuda")["peak_memory_bytes"]["cuda:0"] > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resnet50_with_everything_on(precision, tmp_path):
    words = [
        "recipe=resnet50",
        "mode=single",
        f"precision={precision}",
        "compile=true",
        "batch_size=64",
        "max_steps=12",
    ]
    done = ok(*words, *QUIET, f"output={tmp_path / 'run'}", env=GPU, timeout=600)
    assert "SYNTHETIC" in done.stdout and result(tmp_path / "run")["throughput"]["samples_per_sec"] > 100


def test_killed_and_resumed_is_byte_equal_with_deterministic_kernels(tmp_path):
    words = [*SAME, "deterministic=true", "save.every_steps=5"]
    ok(*words, f"output={tmp_path / 'whole'}", env=GPU)
    trainer(*words, f"output={tmp_path / 'cut'}", env={**GPU, "TRAINER_FAULT": "kill@0:12"})
    ok(*words, f"output={tmp_path / 'cut'}", "resume=auto", env=GPU)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_more_ranks_than_gpus_names_the_right_count():
    done = trainer("recipe=digits", "nproc=2", env=GPU)
    assert done.returncode == 2 and "nproc=1" in done.stderr


@pytest.mark.parametrize(
    "mode",
    [
        ["mode=dp", "devices=[cuda:0,cuda:0]"],
        ["mode=split", "devices=[cuda:0,cuda:0]"],
        ["mode=pipeline", "devices=[cuda:0,cuda:0]", "pipeline.microbatches=4"],
        ["mode=pipeline", "devices=[cuda:0,cuda:0,cuda:0]", "pipeline.split_size=20", "precision=bf16"],
        ["mode=pipeline", "devices=[cuda:0,cuda:0]", "pipeline.microbatches=auto", "pipeline.timeline=true"],
    ],
    ids=lambda words: " ".join(words),
)
def test_modes_of_one_process_on_one_card(mode, tmp_path):
    extra = [word for word in mode if word.startswith("precision")]
    ok(*SAME, *extra, f"output={tmp_path / 'single'}", env=GPU)
    words = [word for word in SAME if not word.startswith("mode=")]
    ok(*words, *mode, f"output={tmp_path / 'run'}", env=GPU)
    tolerance = 2e-2 if extra else 1e-3
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "single"), rel=tolerance)
    assert len(result(tmp_path / "run")["devices"]) >= 2


def test_four_workers_of_local_sgd_on_one_card(tmp_path):
    done = ok("recipe=digits_local_sgd", "nproc=4", "devices=[cuda:0]", *QUIET, f"output={tmp_path / 'run'}", env=GPU)
    found = result(tmp_path / "run")
    assert found["world_size"] == 4 and found["val_top1"] > 0.95, done.stdout
    assert found["throughput"]["per_device"] == pytest.approx(found["throughput"]["samples_per_sec"])

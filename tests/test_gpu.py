"""What needs a CUDA device; skipped with a reason where there is none."""

import pytest

from tests.commands import QUIET, losses, ok, result, trainer

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

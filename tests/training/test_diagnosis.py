"""Verdicts of real runs that were built to be slow in one way, and the probe that leaves no trace."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.command_line import losses, ok, result

SLOW = """
    import time

    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from trainer import register_dataset

    class Sleepy(torch.utils.data.Dataset):
        def __init__(self, length):
            self.length = length

        def __len__(self):
            return self.length

        def __getitem__(self, index):
            time.sleep(0.01)
            return torch.full((1, 8, 8), index % 251, dtype=torch.uint8), index % 10

    @register_dataset("sleepy")
    def sleepy(data):
        return Sleepy(128), Sleepy(8), list("0123456789")

    class SlowNetwork(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.register_comm_hook(None, self.late)

        def late(self, state, bucket):
            time.sleep(0.005)
            return default_hooks.allreduce_hook(None, bucket)
"""
NETWORK = "    torch.nn.parallel.DistributedDataParallel = SlowNetwork\n"
SMALL = ["logging.progress=false", "logging.tensorboard=false", "save.every_epochs=null", "seed=0"]


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(textwrap.dedent(SLOW))
    (tmp_path / "slow_network.py").write_text(textwrap.dedent(SLOW + NETWORK))
    return tmp_path


def judged(folder: Path, *words: str) -> dict:
    done = ok(*words, *SMALL, "output=run", cwd=folder)
    found = result(folder / "run")["verdict"]
    assert f"verdict {' '.join(found['sentence'].split())}" in " ".join(done.stdout.split())  # it is wrapped
    assert sum(found["step"].values()) == pytest.approx(1) and sum(found["run"].values()) == pytest.approx(1)
    assert found["probe_seconds"] <= 0.02 * result(folder / "run")["seconds"]  # 1 %, and the last pass's surprise
    return found


@pytest.mark.slow
def test_a_dataset_that_sleeps(slow):
    words = ["recipe=digits_single", "plugin=slow", "data.name=sleepy", "data.workers=1", "batch_size=8", "threads=1"]
    found = judged(slow, *words, "data.channels=1", "data.image_size=8", "epochs=2")
    assert found["bound"] == "data" and found["step"]["data"] > 0.5, found
    assert found["try"] == ["data.workers=2"]


@pytest.mark.slow
def test_a_slow_all_reduce(slow):
    words = ["recipe=digits", "plugin=slow_network", "nproc=2", "model.name=mlp", "batch_size=32", "epochs=100"]
    found = judged(slow, *words, "ema=null", "max_steps=500")
    assert found["bound"] == "communication" and found["unmeasured"] is None, found
    assert found["try"][0] == "batch_size=64"


@pytest.mark.slow
def test_unbalanced_cuts(tmp_path):
    words = ["recipe=digits_pipeline", "nproc=2", "model.name=vit_tiny", "pipeline.cuts=[add_1]"]
    found = judged(tmp_path, *words, "pipeline.microbatches=8", "batch_size=32", "max_steps=15", "epochs=2", "ema=null")
    assert found["bound"] == "bubble" and found["try"][0] == "pipeline.cuts=auto", found
    assert "stage 1 works" in found["sentence"]


@pytest.mark.slow
def test_nothing_but_computing(tmp_path):
    words = ["recipe=digits_single", "data.name=synthetic", "data.image_size=32", "model.name=resnet20"]
    found = judged(tmp_path, *words, "data.val_samples=64", "threads=1", "batch_size=64", "max_steps=12", "epochs=2")
    assert found["bound"] == "compute" and found["step"]["compute"] > 0.7, found


@pytest.mark.slow
def test_the_probe_leaves_no_trace(tmp_path):
    """A run that was looked at and one that was not, the same to the last byte; BatchNorm, dropout and all."""
    words = ["recipe=digits", "nproc=2", "model.name=cnn", "epochs=10", "max_steps=60", "logging.every_steps=10"]
    looked, plain = tmp_path / "looked", tmp_path / "plain"
    for folder in (looked, plain):
        ok(*words, "logging.progress=false", f"logging.verdict={str(folder == looked).lower()}", f"output={folder}")
    assert result(looked)["verdict"]["probe_seconds"] > 0 and result(plain)["verdict"] is None
    assert losses(looked) == losses(plain)
    weights = [load_file(folder / "last.safetensors") for folder in (looked, plain)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())

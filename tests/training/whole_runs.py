"""Whole runs that tests of several modules start, kill and compare."""

import signal

import pytest
import torch
from safetensors.torch import load_file

from tests.command_line import QUIET, WHOLE, losses, result, steps, trainer
from tests.modes.ways import EXACT, ONE_PROCESS, PIPELINE, WORKERS

# 22 steps, with momentum.
EPOCH = [
    "recipe=digits",
    "batch_size=64",
    "model.name=cnn_gn",
    "optimizer.lr=0.001",
    "schedule.warmup_epochs=0",
    "augment.crop=none",
    "ema=0.9",
    "epochs=1",
    "timeout=60",
    *QUIET,
]


MODES = {
    "single": ["mode=single"],
    **{name: EXACT[name] for name in (*ONE_PROCESS, "ddp", "1f1b")},
    "zbv 2x2": [*PIPELINE, "nproc=4", "pipeline.stages=2", "pipeline.schedule=zbv"],
    **WORKERS,
}


APART = (*WORKERS,)  # other maths, and 23 steps an epoch


def kill(step, *words, rank=0, **options):
    """Run until a rank is killed at that step; everything has ended then."""
    completed = trainer(*words, env={"TRAINER_FAULT": f"kill@{rank}:{step}"}, **options)
    assert completed.returncode in (7, -signal.SIGKILL), completed.stdout + completed.stderr
    assert "Traceback" not in completed.stderr
    return completed


def newest(folder):
    return max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())


def assert_ends_like(folder, whole):
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-4)
    assert [row["step"] for row in steps(folder)] == [row["step"] for row in steps(whole)]
    one, two = (load_file(path / "last.safetensors") for path in (whole, folder))
    torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-5)
    assert result(folder)["val_loss"] == pytest.approx(result(whole)["val_loss"], rel=1e-4)


SAME = [
    "recipe=digits",
    "batch_size=64",
    "optimizer.lr=0.001",
    "augment.crop=none",
    "max_steps=20",
    *WHOLE,
]


def assert_same_run(one, two):
    keep = ("step", "epoch", "train_loss", "lr")
    assert [[row[key] for key in keep] for row in steps(one)] == [
        [row[key] for key in keep] for row in steps(two)
    ]
    assert (one / "last.safetensors").read_bytes() == (two / "last.safetensors").read_bytes()
    assert result(one)["losses"] == result(two)["losses"]
    assert result(one)["best_epoch"] == result(two)["best_epoch"]

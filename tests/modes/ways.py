"""Modes and pipeline schedules as arguments of the command line, and comparisons of their runs.

The modes come from the table in `recipe/mode_table.py`, so a new row there is tested at once.
"""

from __future__ import annotations

import pytest

from tests.command_line import WHOLE, losses, result
from trainer.modes.pipeline.torch_schedules import SCHEDULES
from trainer.recipe import TRAITS
from trainer.saving import checkpoint
from trainer.telemetry.events import read_curves

TWO_DEVICES = "devices=[cpu,cpu]"
PIPELINE = ["mode=pipeline", "pipeline.microbatches=4"]
# Modes in one process, except `single`.
ONE_PROCESS: dict[str, list[str]] = {}
# Modes in two processes that compute the same as `single`, and those that do not.
TWO_PROCESSES: dict[str, list[str]] = {}
WORKERS: dict[str, list[str]] = {}
for mode, traits in TRAITS.items():
    if traits.reference:
        continue
    if traits.micro_batches:
        # The other schedules are added below.
        ONE_PROCESS["streams"] = [*PIPELINE, TWO_DEVICES]
    elif traits.single_device:
        ONE_PROCESS[mode] = [f"mode={mode}"]
    elif traits.processes == "one":
        ONE_PROCESS[mode] = [f"mode={mode}", TWO_DEVICES]
    elif traits.same_maths:
        TWO_PROCESSES[mode] = [f"mode={mode}", "nproc=2"]
    else:
        # Workers that train independently equal `single` only if there is one of them.
        WORKERS[mode] = [f"mode={mode}", "nproc=2"]
# Modes that compute the same as mode=single, except for the order of floating-point sums.
EXACT = {
    **ONE_PROCESS,
    **TWO_PROCESSES,
    "fsdp 4": ["mode=fsdp", "nproc=4", "fsdp.reshard=false"],
    "fsdp 2x2": ["mode=fsdp", "nproc=4", "fsdp.shards=2"],
    **{name: [*PIPELINE, "nproc=2", f"pipeline.schedule={name}"] for name in SCHEDULES},
    "1f1b 2x2": [*PIPELINE, "nproc=4", "pipeline.stages=2"],
}
FP32 = 1e-5  # relative; sums in another order differ by 1e-7 at first


SMALL = [
    "recipe=digits",
    "data.name=synthetic",
    "data.val_samples=90",
    "data.image_size=8",
    "data.channels=1",
    "batch_size=64",
    "ema=0.9",
    "augment.crop=none",
    "schedule.warmup_epochs=0",
    "save.every_epochs=1",
    "logging.verdict=false",
    *WHOLE,
]


SHALLOW = ("model.name=cnn_gn", "optimizer.lr=0.01")


# 10 steps, an evaluation and a checkpoint, and the same again.
TWICE = (
    "data.samples=640",
    "epochs=2",
)


ALONE = {f"{mode} alone": [f"mode={mode}", "nproc=1"] for mode in WORKERS}


def norms(folder):
    return read_curves(folder)["train/grad_norm"][2]


def tensors(folder):
    """The newest checkpoint's, by kind."""
    kept = checkpoint.load_newest(folder, print).state
    kinds = ("model", "optimizer", "ema")
    return {
        kind: {name: tensor.read().double() for name, tensor in kept.part(kind).items()}
        for kind in kinds
    }


def distances(trained, reference):
    """The largest distance of a tensor from that of the same name, as a share of its length, by
    kind.
    """
    assert {kind: {*named} for kind, named in trained.items()} == {
        kind: {*named} for kind, named in reference.items()
    }
    return {
        kind: max(
            float((trained[kind][name] - tensor).norm() / tensor.norm())
            for name, tensor in named.items()
        )
        for kind, named in reference.items()
    }


def assert_same_training(run, reference, norm=True):
    """Losses, gradients' norms, weights, optimizer state, moving average and evaluation of two
    runs.
    """
    assert losses(run) == pytest.approx(losses(reference), rel=FP32)
    if norm:
        assert norms(run) == pytest.approx(norms(reference), rel=FP32)
    apart = distances(tensors(run), tensors(reference))
    assert all(distance < FP32 for distance in apart.values()), apart
    for figure in ("val_loss", "val_top1"):
        assert result(run)[figure] == pytest.approx(result(reference)[figure], rel=FP32)

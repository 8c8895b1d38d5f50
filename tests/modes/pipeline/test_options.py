"""Schedules of a pipeline over processes with the options that change a step: each trains like its
reference.

A row of `OPTIONS` is a bundle of options that do not hide each other; its reference is `single`, or
`1f1b` where the micro-batches themselves change what is computed.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.command_line import WHOLE, latest, losses, ok, result
from tests.modes.ways import FP32, PIPELINE, norms, tensors
from trainer.modes.pipeline.torch_schedules import SCHEDULES

PLUGIN = """
import os
import torch
from torch import nn
from trainer import register_model
from trainer.modes.pipeline.ranks import ProcessPipeline

can_split = ProcessPipeline._can_split_backward

def noting(self, part, arriving):
    answer = can_split(self, part, arriving)
    with open(os.environ["TRAINER_TEST_SPLITS"], "a") as file:
        file.write(f"{part.stage_index}{answer} ")
    return answer

ProcessPipeline._can_split_backward = noting

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.two(torch.tanh(self.one(x))))

class Repeats(nn.Module):
    # The block is called twice in a row, and one of its weights is tied to another block's layer.
    def __init__(self, classes):
        super().__init__()
        self.first, self.block, self.other = nn.Linear(64, 16), Block(), Block()
        self.other.one.weight = self.other.two.weight
        self.third = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, classes)

    def forward(self, x):
        x = torch.tanh(self.first(x.flatten(1)))
        x = self.norm(self.block(self.block(x)))
        x = self.other(torch.tanh(self.third(x)))
        return self.out(x)

@register_model("repeats")
def repeats(num_classes, channels, image_size):
    return Repeats(num_classes)

@register_model("teacher")
def teacher(num_classes, channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""
# An epoch has 80 images, with an incomplete batch of 16, and evaluates 90 in batches of 32.
RUN = [
    "recipe=digits",
    "plugin=repeats",
    "data.name=synthetic",
    "data.samples=80",
    "data.val_samples=90",
    "threads=1",
    "data.image_size=8",
    "data.channels=1",
    "augment.crop=none",
    "batch_size=32",
    "epochs=2",
    "ema=0.9",
]
RUN += ["schedule.warmup_epochs=0", "optimizer.lr=0.05", "logging.verdict=false", *WHOLE]
VIT = "model.name=vit_tiny"
CNN = ["model.name=cnn", "optimizer.lr=0.01"]
SOFT = ["augment.mixup=0.2", "augment.cutmix=1", "loss.label_smoothing=0.1"]
OPTIONS = {
    "step": [VIT, *SOFT, "clip_grad_norm=0.5", "accumulate=2", "graphs=auto"],
    "recompute": [VIT, "recompute=true", "channels_last=true", "loss.class_weights=balanced"],
    "frozen": [VIT, "model.freeze=2", "clip_grad_norm=0.5"],
    "repeats": ["model.name=repeats", "clip_grad_norm=0.5"],
    "repeats, recomputed": ["model.name=repeats", "recompute=true", "accumulate=2"],
    "adamw": ["model.name=repeats", "optimizer.name=adamw", "optimizer.lr=0.001"],
}
# BatchNorm normalises each micro-batch by itself, and `single` has none; half precision rounds each
# by itself.
AGAINST_1F1B = {
    "statistics": [*CNN, "clip_grad_norm=0.5", "channels_last=true"],
    "statistics, recomputed": [*CNN, "recompute=true"],
    "statistics of micro-batches": [*CNN, "pipeline.deferred_batch_norm=false"],
    "bf16": [VIT, "precision=bf16"],
    "fp16": [VIT, "precision=fp16", "recompute=true"],
    "bf16 repeats": ["model.name=repeats", "precision=bf16", "clip_grad_norm=0.5"],
}
FAST = [("zbv", "repeats")]
SPLIT = ("interleavedzerobubble", "zbv", "dualpipev")
SLOW = [(schedule, name) for schedule in SPLIT for name in ("repeats", "recompute", "statistics")]
SLOW.append(("interleavedzerobubble", "repeats, recomputed"))


def marks(schedule, name):
    if (schedule, name) in FAST:
        return ()
    return pytest.mark.slow if (schedule, name) in SLOW else pytest.mark.full("every pair")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run, by its arguments."""
    home = tmp_path_factory.mktemp("options")
    (home / "repeats.py").write_text(PLUGIN)

    @cache
    def folder(*words):
        path = home / str(len([*home.iterdir()]))
        ok(
            *latest(*RUN, *words),
            f"output={path}",
            cwd=home,
            env={"TRAINER_TEST_SPLITS": f"{path}-splits"},
        )
        return path

    return folder


def assert_same(run, reference, tolerance):
    assert len(losses(run)) == 4
    assert losses(run) == pytest.approx(losses(reference), rel=tolerance)
    assert norms(run) == pytest.approx(norms(reference), rel=tolerance)
    trained = tensors(run)
    expected = tensors(reference)
    for kind, named in expected.items():
        assert {*trained[kind]} == {*named}
        for name, tensor in named.items():
            assert (trained[kind][name] - tensor).norm() <= tolerance * tensor.norm(), (
                f"{kind} {name}"
            )
    for figure in ("val_loss", "val_top1"):
        assert result(run)[figure] == pytest.approx(result(reference)[figure], rel=tolerance)


@pytest.mark.full(but=["dualpipev-statistics", "interleavedzerobubble-repeats", "zbv-repeats"])
@pytest.mark.slow(cases=["zbv-repeats"])
@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        pytest.param(s, name, marks=marks(s, name))
        for s in SCHEDULES
        for name in (*OPTIONS, *AGAINST_1F1B)
    ],
)
def test_a_schedule_trains_as_the_reference_with_every_option(schedule, name, trained):
    pipeline = [*PIPELINE, "nproc=2", f"pipeline.schedule={schedule}"]
    if name in OPTIONS:
        words = OPTIONS[name]
        reference = ["mode=single"]
        tolerance = FP32
    else:
        words = AGAINST_1F1B[name]
        reference = [*PIPELINE, "nproc=2", "pipeline.schedule=1f1b"]
        tolerance = 1e-4
    if "accumulate=2" in words:
        pipeline.append("pipeline.microbatches=4")
    assert_same(trained(*words, *pipeline), trained(*words, *reference), tolerance)


@pytest.mark.slow
def test_a_stage_splits_its_backward_pass_unless_a_weight_is_used_twice(trained):
    """The second stage holds the block that is called twice.

    The last one's tied weight needs no other treatment.
    """
    run = trained(
        *OPTIONS["repeats"],
        *PIPELINE,
        "nproc=2",
        "pipeline.schedule=zbv",
        "pipeline.cuts=[first,norm,third]",
    )
    assert {*run.with_name(f"{run.name}-splits").read_text().split()} == {
        "1False",
        "2True",
        "3True",
    }


@pytest.mark.full(cases=["step", "bf16"])
@pytest.mark.slow
@pytest.mark.parametrize("name", ["step", "frozen", "statistics", "bf16"])
def test_every_stage_of_a_plain_model_splits_its_backward_pass(name, trained):
    words = {**OPTIONS, **AGAINST_1F1B}[name]
    run = trained(*words, *PIPELINE, "nproc=2", "pipeline.schedule=interleavedzerobubble")
    assert {*run.with_name(f"{run.name}-splits").read_text().split()} == {"1True", "2True", "3True"}


@pytest.mark.full("every pair")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_learns_from_a_teacher_as_single_does(schedule, trained):
    words = [
        VIT,
        f"distill.teacher={trained('mode=single', 'model.name=teacher')}",
        "distill.temperature=2",
    ]
    pipeline = [*PIPELINE, "nproc=2", f"pipeline.schedule={schedule}"]
    assert_same(trained(*words, *pipeline), trained(*words, "mode=single"), FP32)

"""Every mode and schedule against `single`: gradients' norms, weights, optimizer state and moving average of a run."""

from __future__ import annotations

from functools import cache
from typing import get_args

import pytest

from tests.command_line import WHOLE, losses, ok, result
from tests.modes.ways import EXACT, PIPELINE, WORKERS
from trainer.modes.pipeline.torch_schedules import SCHEDULES
from trainer.recipe.checks import refused_schedules
from trainer.recipe.mode_table import TRAITS
from trainer.recipe.schema import Schedule
from trainer.saving import checkpoint
from trainer.telemetry.events import curves_of

FP32 = 1e-5  # relative; sums in another order differ by 1e-7 at first
SMALL = ["recipe=digits", "data.name=synthetic", "data.val_samples=90", "data.image_size=8", "data.channels=1"]
SMALL += ["batch_size=64", "ema=0.9", "augment.crop=none"]
SMALL += ["schedule.warmup_epochs=0", "save.every_epochs=1", "logging.verdict=false", *WHOLE]
SHALLOW = ("model.name=cnn_gn", "optimizer.lr=0.01")
DEEP = ("model.name=vit_tiny", "optimizer.lr=0.1")  # which can be cut into eight stages
TWICE = ("data.samples=640", "epochs=2")  # 10 steps, an evaluation and a checkpoint, and the same again
ALL_IN_A_STEP = ("data.samples=64", "epochs=20")  # so that workers together have the images that `single` has
ALONE = {f"{mode} alone": [f"mode={mode}", "nproc=1"] for mode in WORKERS}
EVERY_STEP = ["mode=local_sgd", "local_sgd.every=1", "local_sgd.outer_momentum=0"]
AVERAGED = {f"local_sgd averaging every step {n}": [*EVERY_STEP, f"nproc={n}"] for n in (2, 4)}
PIPES = {
    f"{schedule} {name}": ["mode=pipeline", f"pipeline.schedule={schedule}", "pipeline.microbatches=8", *words]
    for schedule in SCHEDULES
    for name, words in {"4": ["nproc=4"], "2x2": ["nproc=4", "pipeline.stages=2"]}.items()
}
FOUR_DEVICES = "devices=[cpu,cpu,cpu,cpu]"
MORE = {
    **{f"{mode} alone": [f"mode={mode}", "nproc=1"] for mode in ("ddp", "fsdp")},
    "ddp 4": ["mode=ddp", "nproc=4"],
    "dp alone": ["mode=dp", "devices=[cpu]"],
    **{f"{mode} 4": [f"mode={mode}", FOUR_DEVICES] for mode in ("dp", "split")},
    "streams 4": [*PIPELINE, FOUR_DEVICES],
    **{name: words for name, words in PIPES.items() if name not in EXACT},
}
PAIRS = EXACT | ALONE | AVERAGED | MORE
LONG = [*MORE, "local_sgd averaging every step 4"]
FAST = ("ddp", "fsdp", "1f1b", "zbv", "dp", "split", "streams", "local_sgd averaging every step 2")


def test_every_mode_and_schedule_is_in_the_table():
    words = {word for way in PAIRS.values() for word in way}
    assert {f"mode={mode}" for mode in TRAITS} - words == {"mode=single"}
    assert {*get_args(Schedule)} - {*EXACT, *refused_schedules()} == set()


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """mode=single's folder, by the words that are not of all runs."""

    @cache
    def folder(words):
        path = tmp_path_factory.mktemp("single") / "run"
        ok(*SMALL, *words, "mode=single", f"output={path}")
        return path

    return folder


def norms(folder):
    return curves_of(folder)["train/grad_norm"][2]


def tensors(folder):
    """The newest checkpoint's, by kind."""
    kept = checkpoint.newest(folder, print).state
    kinds = ("model", "optimizer", "ema")
    return {kind: {name: tensor.read().double() for name, tensor in kept.part(kind).items()} for kind in kinds}


def distances(trained, reference):
    """The largest distance of a tensor from that of the same name, as a share of its length, by kind."""
    assert {kind: {*named} for kind, named in trained.items()} == {kind: {*named} for kind, named in reference.items()}
    return {
        kind: max(float((trained[kind][name] - tensor).norm() / tensor.norm()) for name, tensor in named.items())
        for kind, named in reference.items()
    }


def assert_same_training(run, reference, norm=True):
    """Losses, gradients' norms, weights, optimizer state, moving average and evaluation of two runs."""
    assert losses(run) == pytest.approx(losses(reference), rel=FP32)
    if norm:
        assert norms(run) == pytest.approx(norms(reference), rel=FP32)
    apart = distances(tensors(run), tensors(reference))
    assert all(distance < FP32 for distance in apart.values()), apart
    for figure in ("val_loss", "val_top1"):
        assert result(run)[figure] == pytest.approx(result(reference)[figure], rel=FP32)


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, marks=pytest.mark.full("on more ranks") if pair in LONG else pytest.mark.slow)
        if pair not in FAST
        else pair
        for pair in PAIRS
    ],
)
def test_a_mode_trains_as_single_does(pair, single, tmp_path):
    words = (DEEP if pair in MORE and pair in PIPES else SHALLOW) + (ALL_IN_A_STEP if pair in AVERAGED else TWICE)
    reference, run = single(words), tmp_path / "run"
    ok(*SMALL, *words, *PAIRS[pair], f"output={run}")
    assert len(losses(reference)) == len(norms(reference)) == 20
    assert_same_training(run, reference, norm=pair not in AVERAGED)  # whose ranks have gradients of their own

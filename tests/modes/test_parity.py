"""Modes and schedules compared with `single`: gradient norms, weights, optimizer state and moving
average of a run.
"""

from __future__ import annotations

from functools import cache
from typing import get_args

import pytest

from tests.command_line import latest, losses, ok
from tests.modes.ways import (
    ALONE,
    EXACT,
    PIPELINE,
    SHALLOW,
    SMALL,
    TWICE,
    assert_same_training,
    norms,
)
from trainer.modes.pipeline.torch_schedules import SCHEDULES
from trainer.recipe.checks import list_refused_schedules
from trainer.recipe.mode_table import TRAITS
from trainer.recipe.schema import Schedule

DEEP = ("model.name=vit_tiny", "optimizer.lr=0.1")  # The model can be cut into eight stages.
# Workers together have the images that `single` has. One checkpoint, of the last step, is enough.
ALL_IN_A_STEP = ("data.samples=64", "epochs=20", "save.every_epochs=20")
EVERY_STEP = ["mode=local_sgd", "local_sgd.every=1", "local_sgd.outer_momentum=0"]
AVERAGED = {f"local_sgd averaging every step {n}": [*EVERY_STEP, f"nproc={n}"] for n in (2, 4)}
PIPES = {
    f"{schedule} {name}": [
        "mode=pipeline",
        f"pipeline.schedule={schedule}",
        "pipeline.microbatches=8",
        *words,
    ]
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
FAST = ("ddp", "fsdp", "1f1b", "dp", "split", "streams", "local_sgd averaging every step 2")


def test_every_mode_and_schedule_is_in_the_table():
    words = {word for way in PAIRS.values() for word in way}
    assert {f"mode={mode}" for mode in TRAITS} - words == {"mode=single"}
    assert {*get_args(Schedule)} - {*EXACT, *list_refused_schedules()} == set()


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Return the folder of a mode=single run by its additional arguments."""

    @cache
    def folder(words):
        path = tmp_path_factory.mktemp("single") / "run"
        ok(*latest(*SMALL, *words), "mode=single", f"output={path}")
        return path

    return folder


@pytest.mark.slow(cases=["local_sgd averaging every step 2", "streams", "split", "dp"])
@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(
            pair, marks=pytest.mark.full("on more ranks") if pair in LONG else pytest.mark.slow
        )
        if pair not in FAST
        else pair
        for pair in PAIRS
    ],
)
def test_a_mode_trains_as_single_does(pair, single, tmp_path):
    words = (DEEP if pair in MORE and pair in PIPES else SHALLOW) + (
        ALL_IN_A_STEP if pair in AVERAGED else TWICE
    )
    reference = single(words)
    run = tmp_path / "run"
    ok(*latest(*SMALL, *words), *PAIRS[pair], f"output={run}")
    assert len(losses(reference)) == len(norms(reference)) == 20
    # The ranks have different gradients.
    assert_same_training(run, reference, norm=pair not in AVERAGED)

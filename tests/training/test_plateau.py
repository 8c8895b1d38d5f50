"""schedule.name=plateau against torch's ReduceLROnPlateau."""

import random

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.command_line import steps
from trainer import train
from trainer.errors import RecipeError
from trainer.recipe import load
from trainer.training.state import History
from trainer.training.stopping import lower_rate


@pytest.mark.parametrize("patience", [1, 3])
@pytest.mark.parametrize("min_lr", [0.0, 0.02])
def test_the_rate_is_torchs(patience, min_lr):
    words = [f"schedule.patience={patience}", f"schedule.min_lr={min_lr}", "schedule.gamma=0.5"]
    recipe = load(None, "schedule.name=plateau", "optimizer.lr=0.3", *words)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    reference = ReduceLROnPlateau(
        optimizer, mode="max", factor=0.5, patience=patience, threshold=0, min_lr=min_lr, eps=0
    )
    draw = random.Random(patience)
    history = History()
    rates = set()
    for epoch in range(60):
        metric = draw.random()
        if history.best is None or metric > history.best:
            history.best = metric
            history.best_epoch = epoch
        lower_rate(recipe, history, epoch)
        reference.step(metric)
        rate = recipe.peak_lr * history.lr_factor
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        rates.add(rate)
    assert len(rates) > 3


def test_other_schedules_do_not_wait():
    history = History(best=1.0, best_epoch=0)
    assert lower_rate(load(None, "schedule.name=constant"), history, 50) is None
    assert history.lr_factor == 1


def test_a_patience_that_ends_the_run_first_is_refused():
    with pytest.raises(RecipeError, match=r"stop\.patience=5\b.*schedule\.patience=10\b"):
        load(None, "schedule.name=plateau", "stop.patience=5")


@pytest.mark.slow
def test_a_run_that_ends_within_an_epoch_lowers_nothing_there(tmp_path):
    """Resumed for longer, it has the rates of a run that was planned that long."""
    words = {
        "model": "mlp",
        "mode": "single",
        "batch_size": 479,
        "threads": 1,
        "logging__every_steps": 1,
        "logging__progress": False,
        "optimizer": {"lr": 1e-9},
        "schedule": {"name": "plateau", "patience": 1, "gamma": 0.5, "warmup_epochs": 0},
    }
    train("digits", max_steps=12, output=tmp_path / "whole", **words)
    for max_steps in (8, 12):
        train("digits", max_steps=max_steps, output=tmp_path / "cut", resume="auto", **words)
    whole = [row["lr"] for row in steps(tmp_path / "whole")]
    cut = [row["lr"] for row in steps(tmp_path / "cut")]
    assert whole == cut
    assert len(set(whole)) == 2 and whole[8] != whole[9]

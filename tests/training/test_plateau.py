"""schedule.name=plateau against torch's ReduceLROnPlateau."""

import random

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

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

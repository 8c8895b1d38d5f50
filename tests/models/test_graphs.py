"""What tracing freezes is mended or refused, told by small models with one trap each."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.models.traps import Two, check
from trainer.errors import RecipeError
from trainer.models.partition import trace


def half_dropped(model, h, x):
    return functional.dropout(h, 0.5 if model.training else 0.0, True)


def test_modes_are_not_frozen():
    class Drop(nn.Module):
        def forward(self, x):
            return x if not self.training else x * torch.rand(len(x), 1)

    model = nn.Sequential(Two(half_dropped), Drop(), nn.BatchNorm1d(4), nn.Linear(4, 4))
    stages = trace(model).stages(["0"])
    check(model)
    again = trace(stages[0].eval()).stages([])[0]  # a stage is a model as others are
    assert not again.training


@pytest.mark.parametrize("model_training", [True, False])
def test_the_model_stays_as_it_is(model_training):
    model = Two(lambda m, h, x: h * torch.tensor([1.0, 2, 3, 4])).train(model_training)
    model.act.train(not model_training)
    before, attributes = torch.get_rng_state(), set(vars(model))
    traced = trace(model)
    assert torch.equal(torch.get_rng_state(), before) and set(vars(model)) == attributes
    assert model.training == model_training and model.act.training != model_training
    stages = traced.stages(traced.cuts)
    assert {name for stage in stages for name in stage.state_dict()} == set(model.state_dict())
    assert stages[0].training == model_training
    check(model)


def test_other_arguments_keep_their_defaults():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x, mask=None, *, scale=2.0):
            x = x if mask is None else x * mask
            return self.body(x) * scale

    assert trace(Model()).cuts == ("body.0",)
    check(Model())


@pytest.mark.parametrize(
    ("between", "says"),
    [
        (lambda m, h, x: h if h.sum() > 0 else -h, r"control flow \(test_graphs.py, line \d+\); use mode=ddp"),
        (lambda m, h, x: h if m.training else m.act(h), "in training .*second.* in evaluation "),
        (lambda m, h, x: h + (h if m.training else x), "from other values"),
        (lambda m, h, x: h if random.random() < 2 else x, "draws random numbers"),
        (lambda m, h, x: h * torch.rand(4), "draws random numbers"),
        (lambda m, h, x: h * torch.tensor(float(m.training)), "constants that are not the same"),
    ],
)
def test_what_cannot_be_traced_says_why_and_what_to_do(between, says):
    model, state = Two(between), torch.get_rng_state()
    with pytest.raises(RecipeError, match=says) as caught:
        trace(model, "mine")
    assert str(caught.value).startswith("model.name=mine ")
    assert "\n" not in str(caught.value)
    assert torch.equal(torch.get_rng_state(), state)


def test_one_tensor_in_and_one_out():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    class Late(nn.Linear):
        def forward(self, x, y):
            return super().forward(x + y)

    with pytest.raises(RecipeError, match="more than one"):
        trace(type("Model", (Pair,), {})(2, 2))
    with pytest.raises(RecipeError, match="'y'"):
        trace(Late(2, 2))

"""Values that tracing freezes are corrected or refused, and models are cut at valid points: small
models with one trap each.
"""

import operator
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from trainer.errors import RecipeError
from trainer.models.partition import trace


class Two(nn.Module):
    """Two layers with something between them, given as a function of (model, value, input)."""

    def __init__(self, between, inplace=False):
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 4), nn.ReLU(inplace), nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))
        self.between = between

    def forward(self, x):
        return self.second(self.between(self, self.first(x), x))


def check(model, size=4):
    """Compare all stages in sequence, on leaves that require grad, in both modes and at two batch
    sizes; sent tensors must not change.
    """
    traced = trace(model)
    for training in (True, False):
        for batch in (2, 3):
            received = inputs = torch.randn(batch, size)
            torch.manual_seed(2)
            sent = []
            for stage in traced.stages(traced.cuts):
                out = stage.train(training)(received)
                sent.append((received, received.detach().clone()))
                received = out.detach().requires_grad_()
            assert all(torch.equal(now, then) for now, then in sent[1:])
            torch.manual_seed(2)
            torch.testing.assert_close(out, model.train(training)(inputs))


def half_dropped(model, h, x):
    return functional.dropout(h, 0.5 if model.training else 0.0, True)


def test_modes_are_not_frozen():
    class Drop(nn.Module):
        def forward(self, x):
            return x if not self.training else x * torch.rand(len(x), 1)

    model = nn.Sequential(
        Two(half_dropped),
        Drop(),
        nn.BatchNorm1d(4),
        nn.Linear(4, 4),
    )
    stages = trace(model).stages(["0"])
    check(model)
    again = trace(stages[0].eval()).stages([])[0]  # a stage is a model as others are
    assert not again.training


@pytest.mark.parametrize("model_training", [True, False])
def test_the_model_stays_as_it_is(model_training):
    model = Two(lambda m, h, x: h * torch.tensor([1.0, 2, 3, 4])).train(model_training)
    model.act.train(not model_training)
    before = torch.get_rng_state()
    attributes = set(vars(model))
    traced = trace(model)
    assert torch.equal(torch.get_rng_state(), before) and set(vars(model)) == attributes
    assert model.training == model_training and model.act.training != model_training
    stages = traced.stages(traced.cuts)
    assert {name for stage in stages for name in stage.state_dict()} == set(model.state_dict())
    assert stages[0].training == model_training
    check(model)


def test_other_arguments_keep_their_defaults():
    class Model(Two):
        def forward(self, x, mask=None, *, scale=2.0):
            x = x if mask is None else x * mask
            return super().forward(x) * scale

    model = Model(lambda model, h, x: h)
    assert trace(model).cuts == ("first",)
    check(model)


@pytest.mark.parametrize(
    ("between", "says"),
    [
        (
            lambda m, h, x: h if h.sum() > 0 else -h,
            r"control flow \(test_graphs.py, line \d+\); use mode=ddp",
        ),
        (lambda m, h, x: h if m.training else m.act(h), "in training .*second.* in evaluation "),
        (lambda m, h, x: h + (h if m.training else x), r"training .*\badd\b.*\bother values\b"),
        (lambda m, h, x: h if random.random() < 2 else x, r"\brandom numbers\b.*\bPython\)"),
        (lambda m, h, x: h * torch.rand(4), r"\brandom numbers\b.*\btorch\)"),
        (lambda m, h, x: h * torch.tensor(float(m.training)), "makes constants"),
    ],
)
def test_untraceable_models_are_refused_with_reason_and_suggestion(between, says):
    model = Two(between)
    state = torch.get_rng_state()
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

    with pytest.raises(RecipeError, match=r"^model\.name=Model .*\breturns\b"):
        trace(type("Model", (Pair,), {})(2, 2))
    with pytest.raises(RecipeError, match="'y'"):
        trace(Late(2, 2))


# Points at which a model can be cut.


def added(model, h, x):
    h.add_(1)
    return h


def unpacked(model, h, x):
    a, b = h.chunk(2, 1)
    return torch.cat([b, a], 1)


@pytest.mark.parametrize(
    ("between", "inplace", "cuts", "also"),
    [
        (lambda m, h, x: m.act(h), False, ("act",), {"first"}),
        (
            lambda m, h, x: m.act(h),
            True,
            ("act",),
            {"first"},
        ),  # the cut is after the operation in place
        (
            lambda m, h, x: m.act(h).flatten(1).unflatten(1, (2, 2)).flatten(1),
            True,
            ("flatten_1",),
            {"first", "act", "flatten", "unflatten"},
        ),
        (lambda m, h, x: h + x, False, ("add",), set()),  # the input is live besides
        (lambda m, h, x: h.reshape(x.shape[0], 4), False, ("reshape",), set()),
        (lambda m, h, x: h.reshape(h.shape[0], 4), False, ("reshape",), {"first"}),
        (
            lambda m, h, x: functional.relu(h, True) * m.table.view(1, 4),
            False,
            ("mul",),
            {"first", "relu"},
        ),
        (added, False, ("first",), set()),  # after add_, whose value is the first layer's
        (unpacked, False, ("cat",), {"first", "chunk"}),
    ],
)
def test_places_to_cut(between, inplace, cuts, also):
    traced = trace(Two(between, inplace))
    assert traced.cuts == cuts
    assert set(traced.named) == {*cuts, *also}
    check(traced._model)


@pytest.mark.parametrize(
    "view",
    [
        lambda h: h.view(-1, 4),
        lambda h: h.contiguous(),
        lambda h: functional.dropout(h, 0.0),
        lambda h: torch.narrow(h, 0, 0, 1),
        lambda h: h[:1],
        lambda h: h.float().t().t(),
    ],
)
@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.mul_(2),
        lambda h: torch.relu_(h),
        lambda h: functional.hardtanh(h, -1.0, 1.0, True),
        lambda h: functional.leaky_relu(h, inplace=True),
        lambda h: operator.iadd(h, 1),
        lambda h: operator.imul(h, 2),
    ],
)
def test_no_cut_before_a_change_through_a_view(view, change):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            h = self.layers[0](x)
            seen = change(view(h))  # changes h, which only a third operation reads
            return self.layers[2](self.layers[1](h) + seen.sum())

    assert trace(Model()).cuts == ("add",)
    check(Model())


def test_a_number_changed_is_another_number():
    def between(model, h, x):
        rows = doubled = h.shape[0]
        doubled *= 2
        return h.view(doubled, 2).view(rows, 4)

    assert trace(Two(between)).cuts == ("view_1",)
    check(Two(between))


def test_a_sum_into_a_fresh_tensor_changes_nothing_received():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.branch, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.first(x)
            out = self.branch(x)
            out += x
            return self.last(functional.relu(out, inplace=True))

    assert trace(Model()).cuts == ("first", "relu")
    check(Model())

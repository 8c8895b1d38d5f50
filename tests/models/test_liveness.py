"""Where a model can be cut, told by small models with one trap each."""

import operator

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.models.traps import Two, check
from trainer.models.partition import trace


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
        (lambda m, h, x: m.act(h), True, ("act",), {"first"}),  # the cut is after the operation in place
        (
            lambda m, h, x: m.act(h).flatten(1).unflatten(1, (2, 2)).flatten(1),
            True,
            ("flatten_1",),
            {"first", "act", "flatten", "unflatten"},
        ),
        (lambda m, h, x: h + x, False, ("add",), set()),  # the input is live besides
        (lambda m, h, x: h.reshape(x.shape[0], 4), False, ("reshape",), set()),
        (lambda m, h, x: h.reshape(h.shape[0], 4), False, ("reshape",), {"first"}),
        (lambda m, h, x: functional.relu(h, True) * m.table.view(1, 4), False, ("mul",), {"first", "relu"}),
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

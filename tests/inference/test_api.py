"""`predict` for programs: what one device gives, over several."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from trainer import predict
from trainer.errors import RecipeError


class Scaled(nn.Module):
    """Two outputs in a dictionary."""

    def forward(self, x):
        return {"twice": 2 * x, "sums": (x.sum(1),)}


def test_a_model_over_devices_gives_what_one_gives():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    inputs = torch.randn(100, 6)
    with torch.inference_mode():
        expected = model.eval()(inputs)
    model.train()
    found = predict(model, inputs, devices=["cpu", "cpu"])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.stack(list(predict(model, iter(inputs), devices=["cpu", "cpu"]))), expected)
    assert model.training and predict(model, inputs[:0], devices=["cpu"]) == []
    parts = predict(Scaled(), inputs[:3], devices=["cpu"])
    assert torch.equal(parts[1]["twice"], 2 * inputs[1]) and torch.equal(parts[2]["sums"][0], inputs[2].sum())


def test_a_model_that_only_its_function_knows_travels_by_value():
    class Here(nn.Module):
        def __init__(self):
            super().__init__()
            self.twice = lambda x: 2 * x

        def forward(self, x):
            return self.twice(x)

    model, inputs = Here(), torch.randn(3, 2)
    assert torch.equal(predict(model, inputs, devices=["cpu"]), 2 * inputs)
    model.lock = threading.Lock()
    with pytest.raises(
        RecipeError, match=r"the model cannot be sent to another process \(TypeError: .*let it hold only"
    ):
        predict(model, inputs, devices=["cpu"])


def test_an_endless_stream_is_labelled_as_it_comes():
    def endless():
        n = 0.0
        while True:
            yield torch.tensor([n])
            n += 1

    stream = predict(nn.Identity(), endless(), devices=["cpu", "cpu"])
    assert [next(stream).item() for _ in range(500)] == list(range(500))
    stream.close()


def test_devices_that_are_not_here():
    with pytest.raises(RecipeError, match="is not here"):
        predict(nn.Identity(), torch.zeros(2, 2), devices=["cuda:7"])
    for odd in ("gpu", ["cuda:x"], [torch.device("mps")]):
        with pytest.raises(RecipeError, match="is not a device"):
            predict(nn.Identity(), torch.zeros(2, 2), devices=odd)

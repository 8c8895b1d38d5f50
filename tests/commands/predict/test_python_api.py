"""The Python function `predict`: several devices compute the same as one."""

import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainer import predict
from trainer.errors import RecipeError

PAIRS = TensorDataset(torch.rand(4, 2), torch.arange(4))


class Scaled(nn.Module):
    """Two outputs in a dictionary."""

    def forward(self, x):
        return {"twice": 2 * x, "sums": (x.sum(1),)}


def test_a_model_over_devices_gives_what_one_gives():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(),
        nn.Linear(8, 3),
    )
    inputs = torch.randn(100, 6)
    with torch.inference_mode():
        expected = model.eval()(inputs)
    model.train()
    actual = predict(model, inputs, devices=["cpu", torch.device("cpu")])
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.stack(
            list(
                predict(
                    model,
                    iter(inputs),
                    devices=["cpu", "cpu"],
                )
            )
        ),
        expected,
    )
    none = predict(model, inputs[:0], devices="cpu")
    assert model.training and none.shape == (0, 3) and none.dtype == expected.dtype
    assert predict(Scaled(), inputs[:0], devices=["cpu"]) == []
    parts = predict(Scaled(), inputs[:3], devices=["cpu"])
    assert torch.equal(parts[1]["twice"], 2 * inputs[1])
    assert torch.equal(parts[2]["sums"][0], inputs[2].sum())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model": "runs/x"}, r"trainer\.load\('runs/x'\)\.predict"),
        ({"model": {"a": 1}}, r"torch\.nn\.Module, .*\bdict;"),
        ({"inputs": "photos"}, r"^predict\(\) .*\btensor, .*\bstr$"),
        ({"inputs": None}, r"^predict\(\) .*\btensor, .*\bNoneType$"),
        ({"inputs": DataLoader(PAIRS)}, r"^predict\(\) .*\btensor, .*\bDataLoader$"),
        ({"devices": "gpu"}, r"^devices: gpu .*\bcuda:0\b"),
        ({"devices": []}, r"^devices=\[\] .*\bdevices=auto\b"),
        ({"devices": ["cuda:7"]}, r"^devices: cuda:7 .*\bnot here\b"),
    ],
)
def test_inputs_of_another_kind_are_refused_at_once(given, says):
    # A stream's too: nobody has taken a first output from it.
    with pytest.raises(RecipeError, match=says):
        predict(
            **{
                "model": nn.Linear(2, 2),
                "inputs": [torch.rand(2)],
                "devices": ["cpu"],
                **given,
            }
        )


@pytest.mark.parametrize(
    ("inputs", "says"),
    [(PAIRS, r"\binput 0 .*\btuple: "), ([torch.rand(2), "cat"], r"\binput 1 .*\bstr$")],
)
def test_items_that_are_no_tensors(inputs, says):
    with pytest.raises(RecipeError, match=says):
        list(predict(nn.Linear(2, 2), inputs, devices="cpu"))


def test_a_model_class_defined_in_a_function_is_pickled_by_value():
    class Here(nn.Module):
        def __init__(self):
            super().__init__()
            self.twice = lambda x: 2 * x

        def forward(self, x):
            return self.twice(x)

    model = Here()
    inputs = torch.randn(3, 2)
    assert torch.equal(predict(model, inputs, devices=["cpu"]), 2 * inputs)
    model.lock = threading.Lock()
    with pytest.raises(RecipeError, match=r"model .*\(TypeError: "):
        predict(model, inputs, devices=["cpu"])


@pytest.mark.parametrize("kind", [torch.Tensor, np.ndarray])
def test_an_endless_stream_may_fill_one_buffer_again_and_again(kind):
    """Cameras and many simulations fill the same buffer for each image."""

    def endless():
        buffer = torch.zeros(1)
        while True:
            yield buffer if kind is torch.Tensor else buffer.numpy()
            buffer += 1

    stream = predict(nn.Identity(), endless(), devices=["cpu", "cpu"])
    assert [next(stream).item() for _ in range(500)] == list(range(500))
    stream.close()

"""Sums, held against hand-made figures."""

import pytest
import torch
from torch import nn

from trainer.telemetry.metrics import Sums


def test_sums_leave_padding_out():
    sums = Sums.zero(torch.device("cpu"))
    outputs = torch.eye(6) * 9
    sums.add(outputs, torch.tensor([0, 1, 0, 3, 4, 5]), count=3)
    loss, top1, top5, count = sums.as_tensor().tolist()
    assert (top1, top5, count) == (2, 3, 3)
    assert loss == pytest.approx(
        nn.functional.cross_entropy(outputs[:3], torch.tensor([0, 1, 0]), reduction="sum").item()
    )


def test_sums_with_fewer_than_five_classes_and_nothing_real():
    sums = Sums.zero(torch.device("cpu"))
    sums.add(torch.tensor([[0.0, 1.0]]), torch.tensor([0]), count=1)
    sums.add(torch.tensor([[0.0, 1.0]]), torch.tensor([1]), count=0)
    assert sums.as_tensor().tolist()[1:] == [0, 1, 1]

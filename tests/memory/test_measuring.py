"""Bytes, held against what autograd keeps."""

import copy

import pytest
import torch
from torch import nn

from trainer.memory.measuring import measure_pass
from trainer.models.balance import time_blocks
from trainer.models.partition import trace


def pass_of(model, shape):
    """The pass of a batch of `shape` in fp32, from shapes alone; gradients are there already."""
    probe = copy.deepcopy(model).to("meta").train()
    return measure_pass(probe, probe, torch.empty(shape, device="meta"))


def test_saved_bytes_against_what_autograd_keeps():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 64, 10),
    )
    kept = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(torch.randn(4, 3, 8, 8))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    real = sum(t.untyped_storage().nbytes() for ptr, t in kept.items() if ptr not in own)
    assert out.shape == (4, 10)
    inputs = 4 * 3 * 8 * 8 * 4
    assert pass_of(model, (4, 3, 8, 8)).saved + inputs == pytest.approx(real, rel=0.05)


def test_blocks_on_a_device_keep_together_what_the_whole_keeps_on_shapes_alone():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3),
        nn.Flatten(),
    )
    kept = sum(
        cost.kept
        for cost in time_blocks(
            trace(model),
            torch.randn(4, 3, 8, 8),
            repeats=1,
        )
    )
    assert kept == pass_of(model, (4, 3, 8, 8)).saved

"""Bytes of a device."""

import torch

from trainer.telemetry import device_memory


def test_memory_figures_are_plausible():
    device = torch.device("cpu")
    assert 2**20 < device_memory.peak_memory(device) < 2**40
    assert 2**20 < device_memory.free_memory(device) < 2**50

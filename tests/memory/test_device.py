"""Bytes of a device."""

import pytest
import torch

from trainer.memory import device as device_memory


def test_memory_figures_are_plausible():
    device = torch.device("cpu")
    assert 2**20 < device_memory.peak_memory(device) < 2**40
    assert 2**20 < device_memory.free_memory(device) < 2**50


@pytest.mark.parametrize("index", [None, 0, 1])
@pytest.mark.parametrize("allocated", [300, 700])
@pytest.mark.parametrize("graphs_on", [None, 0, 1])
def test_memory_of_graphs_counts_where_they_are(monkeypatch, index, allocated, graphs_on):
    """Memory of graphs counts on its card alone, and is never less than the allocated memory."""
    segments = [{"device": card, "segment_pool_id": (0, 0)} for card in (0, 1)]
    if graphs_on is not None:
        segments.append({"device": graphs_on, "segment_pool_id": (0, 1)})
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocated)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    actual = device_memory.peak_memory(
        torch.device("cuda", index) if index is not None else torch.device("cuda")
    )
    assert actual == (max(allocated, 500) if graphs_on == (index or 0) else allocated)

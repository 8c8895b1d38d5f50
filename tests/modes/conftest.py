"""What tests of several modes share."""

import pytest
import torch


@pytest.fixture
def here(monkeypatch):
    """Training within this process as the only rank, which leaves the number of threads as it was."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("NPROC", "1")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)

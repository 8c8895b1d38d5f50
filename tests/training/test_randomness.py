"""Random states are restored exactly."""

import os
import random

import numpy as np
import pytest
import torch

from tests.simulated.simcuda.runs import alone
from trainer.training.randomness import (
    read_random_states,
    restore_random_states,
    seed_everything,
    seed_ranks,
)


@pytest.fixture(autouse=True)
def _own_generators():
    with alone():
        yield


def draw():
    return random.random(), np.random.rand(), torch.rand(3).tolist()


def test_states_travel_as_tensors():
    seed_everything(3, deterministic=False)
    draw()
    states = read_random_states([torch.device("cpu")])
    assert all(isinstance(value, torch.Tensor) for value in states.values())
    expected = draw()
    draw()
    assert restore_random_states(states, [torch.device("cpu")]) == []
    assert draw() == expected


def test_ranks_differ_and_rank_0_is_the_single_process():
    drawn = []
    for rank in (0, 1, 0):
        seed_ranks(7, rank)
        drawn.append(draw())
    assert drawn[0] == drawn[2] != drawn[1]


def test_deterministic_kernels_of_cublas_need_no_variable_to_be_typed(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda wanted: None)
    seed_everything(3, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the user's own stays
    seed_everything(3, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"

"""Seeds and random states: set once, saved with every checkpoint, put back on resume."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed Python, NumPy and torch alike on every rank, so that each builds the same model."""
    seed_ranks(seed, 0)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS wants for it
        torch.use_deterministic_algorithms(True)
    # A race among cuDNN's kernels has other winners for other shapes, and they round otherwise: not in the runs whose
    # losses `compare` holds against each other.
    torch.backends.cudnn.benchmark = not deterministic and "TRAINER_EXACT" not in os.environ


def seed_ranks(seed: int, rank: int) -> None:
    """Give each rank its own stream (dropout); rank 0's is the one that a single process has."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed((seed + rank) % 2**63)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """This rank's generators as tensors."""
    _, python, _ = random.getstate()
    legacy = np.random.get_state(legacy=False)
    states = {
        "python": torch.tensor(python),
        "numpy": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor(legacy["state"]["pos"]),
        "torch": torch.get_rng_state(),
    }
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def restore_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Continue where `random_states` was taken."""
    random.setstate((3, tuple(states["python"].tolist()), None))
    key = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, int(states["numpy_position"]), 0, 0.0))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)

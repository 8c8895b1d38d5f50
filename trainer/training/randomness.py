"""Seeds and random states: set once, saved with every checkpoint, put back on resume."""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int, deterministic: bool, compiled: bool = False) -> None:
    """Seed Python, NumPy and torch alike on every rank, so that each builds the same model."""
    seed_ranks(seed, 0)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS wants for it
        torch.use_deterministic_algorithms(True)
        if compiled:
            # Else the compiler takes the kernel that wins a race, and a process that resumes may see another winner.
            importlib.import_module("torch._inductor.config").deterministic = True  # type: ignore[attr-defined]
    # A race among cuDNN's kernels has other winners for other shapes, and they round otherwise: not in the runs whose
    # losses `compare` holds against each other.
    torch.backends.cudnn.benchmark = not deterministic and "TRAINER_EXACT" not in os.environ


def seed_ranks(seed: int, rank: int) -> None:
    """Give each rank its own stream (dropout); rank 0's is the one that a single process has."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed((seed + rank) % 2**63)


@contextmanager
def as_before() -> Iterator[None]:
    """Behind this block generators, threads and torch's switches are as they were: a run in a program sets its own."""
    seen = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.device("cuda", n) for n in range(torch.cuda.device_count())] if seen else []
    states, threads, benchmark = random_states(devices), torch.get_num_threads(), torch.backends.cudnn.benchmark
    strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    tf32 = None
    with suppress(RuntimeError):  # set by torch's newer names, which these cannot tell
        tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    raceless = getattr(sys.modules.get("torch._inductor.config"), "deterministic", False)
    try:
        yield
    finally:
        compiler: Any = sys.modules.get("torch._inductor.config")
        if compiler is not None:
            compiler.deterministic = raceless
        restore_random_states(states, devices)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict[0], warn_only=strict[1])
        torch.backends.cudnn.benchmark = benchmark
        if tf32 is not None:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


def random_states(devices: Sequence[torch.device]) -> dict[str, Tensor]:
    """This rank's generators as tensors: the CPU's, and those of the devices that it drives."""
    _, python, _ = random.getstate()
    legacy = np.random.get_state(legacy=False)
    states = {
        "python": torch.tensor(python),
        "numpy": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor(legacy["state"]["pos"]),
        "torch": torch.get_rng_state(),
    }
    return states | {key: torch.cuda.get_rng_state(device) for key, device in _on_devices(devices).items()}


def restore_random_states(states: dict[str, Tensor], devices: Sequence[torch.device]) -> list[torch.device]:
    """Continue where `random_states` was taken; gives the devices whose generators were not saved and start anew."""
    random.setstate((3, tuple(states["python"].tolist()), None))
    key = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, int(states["numpy_position"]), 0, 0.0))
    torch.set_rng_state(states["torch"])
    missing = []
    for name, device in _on_devices(devices).items():
        if name in states:
            torch.cuda.set_rng_state(states[name], device)
        else:
            missing.append(device)
    return missing


def _on_devices(devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """Each CUDA device once, by what its generator is saved as: cuda, cuda:1, ... in the order of their stages or
    replicas, whatever their numbers are, so that a run may go on on other cards."""
    distinct = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    return {f"cuda:{place}" if place else "cuda": device for place, device in enumerate(distinct)}

"""Seeds and states of random number generators, which checkpoints save."""

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
    """Seed Python, NumPy and torch, and choose between deterministic and fast kernels.

    The seed is the same on every rank, so that all ranks build the same model.

    Args:
        seed: The seed.
        deterministic: Whether to use deterministic kernels only.
        compiled: Whether the model is compiled.
    """
    seed_ranks(seed, 0)
    if deterministic:
        # Without a fixed workspace, cuBLAS may round differently from run to run, and some versions
        # of torch raise an error in deterministic mode.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if compiled:
            # By default the compiler times several kernels and chooses the fastest. A process that
            # resumes might choose a different one.
            importlib.import_module("torch._inductor.config").deterministic = True  # type: ignore[attr-defined]
    # False is set too, because the setting of the calling program must not change a run.
    torch.use_deterministic_algorithms(deterministic)
    # cuDNN's benchmark chooses different kernels for different shapes, and these round differently.
    # TRAINER_EXACT switches the benchmark off in runs whose losses the command `compare` compares.
    torch.backends.cudnn.benchmark = not deterministic and "TRAINER_EXACT" not in os.environ


def seed_ranks(seed: int, rank: int) -> None:
    """Seed the generators of this rank, so that dropout differs from rank to rank.

    Rank 0 gets the same random numbers as a run with a single process.
    """
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed((seed + rank) % 2**63)


@contextmanager
def restore_global_state() -> Iterator[None]:
    """Restore random generators, number of threads and torch's global switches after this block.

    A run changes all of these, and the program that calls `train` may rely on them.
    """
    is_initialized = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = []
    if is_initialized:
        devices = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    states = read_random_states(devices)
    threads = torch.get_num_threads()
    benchmark = torch.backends.cudnn.benchmark
    debug_mode = torch.get_deterministic_debug_mode()
    tf32 = None
    # Reading these attributes raises an error if the program has set TF32 through torch's newer
    # attributes. In this case TF32 is not restored.
    with suppress(RuntimeError):
        tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    compiler: Any = sys.modules.get("torch._inductor.config")
    compiler_deterministic = getattr(compiler, "deterministic", False)
    try:
        yield
    finally:
        # The module is looked up again, because the run may have imported it.
        compiler = sys.modules.get("torch._inductor.config")
        if compiler:
            compiler.deterministic = compiler_deterministic
        restore_random_states(states, devices)
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(debug_mode)
        torch.backends.cudnn.benchmark = benchmark
        if tf32 is not None:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


def read_random_states(devices: Sequence[torch.device] = ()) -> dict[str, Tensor]:
    """Return the states of the generators of Python, NumPy and torch.

    Torch has a generator on the CPU, and one on each CUDA device of `devices`.
    """
    _, python, _ = random.getstate()
    numpy = np.random.get_state(legacy=False)["state"]
    states = {
        "python": torch.tensor(python),
        "numpy": torch.from_numpy(numpy["key"].astype(np.int64)),
        "numpy_position": torch.tensor(numpy["pos"]),
        "torch": torch.get_rng_state(),
    }
    for key, device in _name_cuda_devices(devices).items():
        states[key] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(
    states: dict[str, Tensor], devices: Sequence[torch.device] = ()
) -> list[torch.device]:
    """Restore the states that `read_random_states` has returned.

    Returns:
        The CUDA devices for which `states` has no state. Their generators keep the present state.
    """
    random.setstate((3, tuple(states["python"].tolist()), None))
    key = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, int(states["numpy_position"]), 0, 0.0))
    torch.set_rng_state(states["torch"])
    missing = []
    for name, device in _name_cuda_devices(devices).items():
        if name in states:
            torch.cuda.set_rng_state(states[name], device)
        else:
            missing.append(device)
    return missing


def _name_cuda_devices(devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """Return each CUDA device once, by the name under which its generator is saved.

    The names cuda, cuda:1, ... follow the order of stages or replicas, not the numbers of the
    devices, so that a run may resume on other GPUs.
    """
    named: dict[str, torch.device] = {}
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            name = f"cuda:{len(named)}" if named else "cuda"
            named[name] = device
    return named

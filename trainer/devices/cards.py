"""Detecting this machine's cards: how many can this torch use, and why not all of them?

A run asks as it starts, and so does `python -m trainer doctor`. Where no NVIDIA card is, nothing is asked and torch is
not loaded. Whether it computes correctly on them is asked in `health`.
"""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainer.errors import RecipeError, SetupError, TrainerError

NONE_VISIBLE = {"", "-1", "none", "void", "nodevfiles"}  # of CUDA_VISIBLE_DEVICES; the last is SLURM's
REINSTALL = "pip install --force-reinstall torch torchvision"
NO_NCCL = f"this torch has no NCCL, which ranks on cards talk through: {REINSTALL}, or train with devices=[cpu]"
MIG = "/proc/driver/nvidia/capabilities/gpu*/mig/gi*"  # a process sees one part of a divided card, so fewer is right


@dataclass(frozen=True)
class Cards:
    """How many CUDA devices torch can use, and why not all that are here, if so."""

    count: int = 0
    fault: TrainerError | None = None


def detect(environment: Mapping[str, str] = os.environ) -> Cards:
    """Count the cards that torch can use. Torch is asked only where a driver's device node shows that there are some.

    A machine without any, or a CUDA_VISIBLE_DEVICES that hides all, has none, and that is no fault.
    """
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    names = None if shown is None else [name.strip() for name in shown.split(",")]
    if names and "-1" in names:  # CUDA reads up to there
        names = names[: names.index("-1")]
    if shown is not None and (shown.strip().lower() in NONE_VISIBLE or not names):
        return Cards()
    nodes, perhaps = device_nodes()
    if not nodes and not perhaps:
        return Cards()
    import torch

    count, reason = runtime_count()
    if names is not None and count < len(names) and (count or "GPUs are available" in reason):
        what = f"CUDA_VISIBLE_DEVICES={str(shown)[:80]} names {len(names)}, and CUDA sees {count} of them"
        right = ",".join(names[:count]) or "0"
        advice = f"type CUDA_VISIBLE_DEVICES={right}, or leave it unset for all; nvidia-smi -L lists them"
        return Cards(count, RecipeError(f"{what}: {advice}"))
    here = f"this machine has {len(nodes)} NVIDIA card{'s' * (len(nodes) > 1)}"
    if not count:
        what = f"{here}, but " if nodes else ""
        what += f"torch {torch.__version__} cannot use it ({reason[:300] or 'CUDA gives no reason'})"
        fault = SetupError(f"{what}: see whether nvidia-smi lists it; or train on the CPU with devices=[cpu]")
        return Cards(fault=fault if nodes or torch.version.hip is not None else None)
    hidden = 0 if names is not None or count >= len(nodes) or glob.glob(MIG) else len(_openable(nodes)) - count
    if hidden <= 0:
        return Cards(count)
    listed = ",".join(f"cuda:{index}" for index in range(count))
    what = f"{here} and CUDA sees {count}: {hidden} may have failed (nvidia-smi and dmesg tell)"
    return Cards(count, SetupError(f"{what}; train on those it sees with devices=[{listed}]"))


def device_nodes() -> tuple[list[str], list[str]]:
    """The device nodes of NVIDIA's cards, and of what may be a card that torch can use."""
    nodes = sorted(glob.glob("/dev/nvidia[0-9]*"))
    if not nodes and glob.glob("/usr/lib/wsl/lib/libcuda.so*"):
        nodes = glob.glob("/dev/dxg")
    return nodes, glob.glob("/dev/kfd") + glob.glob("/proc/driver/nvidia/gpus/*")


def _openable(nodes: Iterable[str]) -> list[str]:
    """Those that this process may use: a container or SLURM denies others, and a card that failed cannot be opened."""
    allowed = []
    for node in nodes:
        try:
            os.close(os.open(node, os.O_RDWR))
        except PermissionError:
            continue
        except OSError:
            pass
        allowed.append(node)
    return allowed


def runtime_count() -> tuple[int, str]:
    """CUDA's own count of devices, and the reason where it is none.

    `torch.cuda.device_count()` asks the driver's management library instead, which also counts a card that has failed,
    every whole card that is divided (MIG), and all cards under a driver that is too old.
    """
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return 0, f"it is built without CUDA: {REINSTALL}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch._C._cuda_getDeviceCount()
        if count:
            return count, ""
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            return 0, " ".join(str(error).split())
    return 0, " ".join(str(warning.message) for warning in caught)

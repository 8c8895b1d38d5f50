"""Detecting this machine's cards: how many can this torch use, and why not all of them?

A run asks as it starts, and so does `python -m trainer doctor`. Where no NVIDIA card is, nothing is asked and torch is
not loaded. Whether it computes correctly on them is asked in `health`.
"""

from __future__ import annotations

import glob
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from trainer.errors import RecipeError, SetupError, TrainerError

NONE_VISIBLE = {"", "-1", "none", "void", "nodevfiles"}  # of CUDA_VISIBLE_DEVICES; the last is SLURM's
REINSTALL = "pip install --force-reinstall torch torchvision"
# torch 2.14 is the last with builds for CUDA 12, which older drivers and cards before Turing need.
CUDA_12 = "torch 2.14 for CUDA 12.6 (the command is on pytorch.org, under previous versions)"
NO_NCCL = f"this torch has no NCCL, which ranks on cards talk through: {REINSTALL}, or train with devices=[cpu]"
ON_CPU = "or train on the CPU with devices=[cpu]"


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
    if shown is not None and shown.strip().lower() in NONE_VISIBLE:
        return Cards()
    nodes, perhaps = device_nodes()
    if not nodes and not perhaps:
        return Cards()
    try:
        names = visible(shown)
    except RecipeError as fault:
        return Cards(fault=fault)
    if names == []:
        return Cards()
    import torch

    count, reason = runtime_count()
    if names is not None and count < len(names) and (count or "GPUs are available" in reason):
        return Cards(count, RecipeError(_fewer(str(shown), names, count)))
    if not count:
        ours = nodes or torch.version.hip is not None
        here = f"this machine has {_cards(nodes)}, but " if nodes else ""
        what = f"{here}torch {torch.__version__} cannot use it ({reason[:300] or 'CUDA gives no reason'})"
        return Cards(fault=SetupError(f"{what}: see whether nvidia-smi lists it; {ON_CPU}") if ours else None)
    hidden = 0 if names is not None or count >= len(nodes) or glob.glob(MIG) else len(_openable(nodes)) - count
    if hidden <= 0:
        return Cards(count)
    listed = ",".join(f"cuda:{index}" for index in range(count))
    what = (
        f"this machine has {_cards(nodes)} and CUDA sees {count}: {hidden} may have failed (nvidia-smi and dmesg tell)"
    )
    return Cards(count, SetupError(f"{what}; train on those it sees with devices=[{listed}]"))


MIG = "/proc/driver/nvidia/capabilities/gpu*/mig/gi*"  # a process sees one part of a divided card, so fewer is right


def device_nodes() -> tuple[list[str], list[str]]:
    """The device nodes of NVIDIA's cards, and of what may be a card that torch can use."""
    nodes = sorted(glob.glob("/dev/nvidia[0-9]*"))
    if not nodes and glob.glob("/usr/lib/wsl/lib/libcuda.so*"):
        nodes = glob.glob("/dev/dxg")
    return nodes, glob.glob("/dev/kfd") + glob.glob("/proc/driver/nvidia/gpus/*")


def _cards(nodes: Sequence[str]) -> str:
    return f"{len(nodes)} NVIDIA card{'s' * (len(nodes) > 1)} ({nodes[0]}{' ...' * (len(nodes) > 1)})"


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


def visible(text: str | None) -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names, None: all. Raises RecipeError where CUDA would see other cards, or none."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    if "-1" in names:  # CUDA reads up to there
        names = names[: names.index("-1")]
    odd = [name for name in names if not re.fullmatch(r"\d{1,4}|GPU-[0-9a-fA-F-]+|MIG-[\w/-]+", name)]
    if odd or len(set(names)) < len(names):
        wrong = f"'{odd[0][:40]}' is not a card" if odd else "it names a card twice, and CUDA then sees none"
        raise RecipeError(
            f"CUDA_VISIBLE_DEVICES={text[:80]}: {wrong}; type CUDA_VISIBLE_DEVICES=0,1 (numbers, or names as "
            "nvidia-smi -L prints them), or leave it unset for all cards"
        )
    return names


def _fewer(shown: str, names: Sequence[str], count: int) -> str:
    what = f"there is no card {names[count]}, and CUDA leaves out what follows it"
    if count and names[count].startswith("MIG-"):
        what = "CUDA gives a process one part of a divided card, so start a training for each part"
    rest = f"type CUDA_VISIBLE_DEVICES={','.join(names[:count])} for those before it, " if count else ""
    return f"CUDA_VISIBLE_DEVICES={shown[:80]}: {what}: {rest}or leave it unset for all cards; nvidia-smi -L lists them"


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


def driver_version() -> str:
    """The NVIDIA kernel driver's, as 580.65.06; empty where there is none."""
    with suppress(OSError), open("/sys/module/nvidia/version") as file:
        return file.read().strip()
    with suppress(OSError), open("/proc/driver/nvidia/version") as file:
        match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", file.read())
        return match[1] if match else ""
    return ""

"""Versions, the parts of torch that training needs, and whether processes here can talk to each other."""

from __future__ import annotations

import importlib
import platform
import sys
from pathlib import Path

from trainer.commands.doctor.findings import Findings
from trainer.commands.doctor.process_groups import Group
from trainer.devices import cards
from trainer.recipe.versions import VERSION, installed

SOFTWARE, PROCESSES = "software", "between processes"


def versions(report: Findings) -> bool:
    """Of everything that a report of a bug should name; returns whether torch and torchvision could be loaded."""
    problems = len(report.problems)
    report.row(SOFTWARE, "trainer", f"{VERSION} ({Path(__file__).parents[2]})")
    report.row(SOFTWARE, "Python", f"{platform.python_version()} ({sys.executable})")
    report.row(SOFTWARE, "system", platform.platform())
    for name in ("torch", "torchvision"):
        report.row(SOFTWARE, name, installed(name))
        report.trying(name, importlib.import_module, name)
    report.row(SOFTWARE, "NVIDIA driver", cards.driver_version() or "none")
    loaded = len(report.problems) == problems
    if loaded:
        _build(report)
    return loaded


def _build(report: Findings) -> None:
    """What torch was built with."""
    import torch

    if torch.version.hip:
        report.row(SOFTWARE, "built for", f"ROCm {torch.version.hip}")
    report.row(SOFTWARE, "CUDA of torch", torch.version.cuda or "none: a build for the CPU")
    if torch.version.cuda:
        report.row(SOFTWARE, "cuDNN", _dotted(torch.backends.cudnn.version()))  # type: ignore[no-untyped-call]
        report.row(SOFTWARE, "code for", " ".join(torch.cuda.get_arch_list()) or "unknown")


def _dotted(version: int | None) -> str:
    """90200 is 9.2.0, and before that 8902 was 8.9.2."""
    if version is None:
        return "none"
    major = version // 10_000 if version >= 90_000 else version // 1000
    rest = version - major * (10_000 if version >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def processes(report: Findings) -> None:
    """Sum over two real processes on the CPU."""
    import torch.distributed as dist

    if not dist.is_available():
        report.problem(f"this torch has no torch.distributed, so only modes of one process train: {cards.REINSTALL}")
        return
    with Group("gloo", 2) as ranks:
        report.row(PROCESSES, "gloo, 2 processes", report.trying("gloo", ranks.outcome) or "FAILS, see below")


def nccl(report: Findings, count: int) -> None:
    """Sum over the cards, where there are several."""
    import torch
    import torch.distributed as dist

    if torch.version.cuda is None or not dist.is_available():
        return
    if not dist.is_nccl_available():
        report.row(PROCESSES, "NCCL", "none")
        if count > 1:
            report.problem(cards.NO_NCCL)
        return
    report.row(PROCESSES, "NCCL", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    if count > 1:
        with Group("nccl", count) as ranks:
            report.row(PROCESSES, f"NCCL, {count} cards", report.trying("NCCL", ranks.outcome) or "FAILS, see below")

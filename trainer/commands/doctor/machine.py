"""Cores, memory, disk, limits, and the environment variables that change how training runs."""

from __future__ import annotations

import math
import os
import re
import resource
import shutil
import sys

from trainer.commands.doctor.findings import Findings
from trainer.devices import host
from trainer.processes.peers import shared_memory
from trainer.processes.resources import cores

GIB = 2**30
BUFFERS = 2**28  # bytes that loader workers share for a usual batch of photos
OPEN_FILES = 512
TELLING = re.compile(
    r"(CUDA|NVIDIA|NCCL|GLOO|TORCH|PYTORCH|CUBLAS|HIP|ROCR|OMP|MKL|KMP|GOMP|TRAINER|SLURM|PET|UCX|TORCHELASTIC)_"
    r"|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)$|(MASTER_(ADDR|PORT)|NPROC|NNODES|NODE_RANK|LD_LIBRARY_PATH|LD_PRELOAD)$"
)
SECRET = re.compile("TOKEN|SECRET|PASS|KEY|JWT")


def resources(report: Findings) -> None:
    """What there is to compute and to store with."""
    title = "machine"
    report.row(title, "processor", f"{host.processor()}, {os.cpu_count()} cores, {cores()} for this process")
    quota = host.group_setting("cpu", "cpu.max") or host.group_setting("cpu", "cpu.cfs_quota_us")
    if quota and not quota.startswith(("max", "-1")):
        quota += f" {host.group_setting('cpu', 'cpu.cfs_period_us')}"
        report.row(title, "cores' quota (cgroup)", _cores_of(quota))
    report.row(title, "threads", _threads())
    report.row(title, "memory", f"{host.free_memory() / GIB:.1f} of {host.total_memory() / GIB:.1f} GiB free")
    limit = host.memory_limit()
    if limit is not None:
        report.row(title, "memory's limit (cgroup)", f"{limit / GIB:.1f} GiB")
    report.row(title, "/dev/shm", shared_memory())
    usage = shutil.disk_usage(os.getcwd())
    report.row(title, "disk of this folder", f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free")
    if usage.free < GIB:
        report.problem("less than 1 GiB of disk is free here: free some, or train with output= on another disk")
    if not os.access(".", os.W_OK):
        report.problem(
            f"nothing can be written into {os.getcwd()}: cd to a folder of yours, or train with output=FOLDER"
        )


def precisions(report: Findings) -> None:
    """How fast the processor computes in numbers of 16 bits."""
    from trainer.devices import precision  # needs torch

    for name in precision.AUTOCAST:
        times = precision.cpu_speed(name)
        unclear = "not known: the times of convolutions vary too much, as next to other programs; try again"
        text = unclear if math.isnan(times) else f"{times:.2g} times as fast as fp32, in a convolution on one core"
        report.row("processor", name, text)


def try_loader_memory() -> None:
    """Raises SetupError where loader workers would find too little."""
    from trainer.data.workers import worker_counts  # needs torch

    worker_counts.check_shared_memory(BUFFERS)


def limits(report: Findings) -> None:
    """What the system allows this user."""
    title = "limits"
    for name, number, unit in (
        ("open files", resource.RLIMIT_NOFILE, 1),
        ("processes", resource.RLIMIT_NPROC, 1),
        ("locked memory, MiB", resource.RLIMIT_MEMLOCK, 2**20),
        ("address space, MiB", resource.RLIMIT_AS, 2**20),
    ):
        soft, hard = resource.getrlimit(number)
        report.row(title, name, _limit(soft, unit) + (f" (at most {_limit(hard, unit)})" if soft != hard else ""))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        report.problem(f"only {soft} files may be open at once, too few for several processes: ulimit -n 4096")
    pids = host.group_setting("pids", "pids.max")
    if pids.isdigit():
        report.row(title, "processes (cgroup)", pids)


def variables(report: Findings) -> None:
    """Environment variables that torch, NCCL, gloo or we read."""
    for name in sorted(os.environ):
        if TELLING.match(name) and not SECRET.search(name):
            report.row("environment", name, os.environ[name][:300] or '""')


def _limit(value: int, unit: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value // unit)


def _threads() -> str:
    torch = sys.modules.get("torch")
    count = getattr(torch, "get_num_threads", cores)()
    return f"{count} in one process"


def _cores_of(quota: str) -> str:
    used, period = map(int, quota.split()[:2])
    return f"{used / period:.1f} cores: more threads than that only wait (threads=)"

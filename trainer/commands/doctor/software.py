"""Versions, the parts of torch that training needs, whether processes here can talk to each other; and the machine:
cores, memory, disk, limits, and the environment variables that change how training runs."""

from __future__ import annotations

import datetime
import importlib
import math
import os
import platform
import re
import resource
import shlex
import shutil
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from trainer.commands.doctor.findings import Findings
from trainer.devices import cards, host
from trainer.errors import SetupError, explain
from trainer.processes import fork_server
from trainer.processes.peers import shared_memory
from trainer.processes.resources import cores
from trainer.recipe.versions import VERSION, installed

SOFTWARE, PROCESSES = "software", "between processes"
TIMEOUT = 60.0  # seconds
GIB = 2**30
BUFFERS = 2**28  # bytes that loader workers share for a usual batch of photos
OPEN_FILES = 512
TELLING = re.compile(
    r"(CUDA|NVIDIA|NCCL|GLOO|TORCH|PYTORCH|CUBLAS|HIP|ROCR|OMP|MKL|KMP|GOMP|TRAINER|SLURM|PET|UCX|TORCHELASTIC)_"
    r"|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)$|(MASTER_(ADDR|PORT)|NPROC|NNODES|NODE_RANK|LD_LIBRARY_PATH|LD_PRELOAD)$"
)
SECRET = re.compile("TOKEN|SECRET|PASS|KEY|JWT")


def versions(report: Findings) -> bool:
    """Of what training uses itself; returns whether torch and torchvision could be loaded."""
    problems = len(report.problems)
    report.row(SOFTWARE, "trainer", f"{VERSION} ({Path(__file__).parents[2]})")
    report.row(SOFTWARE, "Python", f"{platform.python_version()} ({sys.executable}), {platform.platform()}")
    for name in ("torch", "torchvision"):
        report.row(SOFTWARE, name, installed(name))
        report.trying(name, importlib.import_module, name)
    report.row(SOFTWARE, "NVIDIA driver", cards.driver_version() or "none")
    loaded = len(report.problems) == problems
    if loaded:
        _build(report)
        _jpeg(report)
    return loaded


def _build(report: Findings) -> None:
    """What torch was built for, and what tells the rest."""
    import torch

    built = f"ROCm {torch.version.hip}" if torch.version.hip else torch.version.cuda
    report.row(SOFTWARE, "CUDA of torch", built or "none: a build for the CPU")
    report.row(SOFTWARE, "other versions", f"{shlex.quote(sys.executable)} -m torch.utils.collect_env")


def _jpeg(report: Findings) -> None:
    """Whose decoder reads photos."""
    from trainer.data.photos.jpeg import codec  # needs torch

    used = codec()
    version = installed(used.name)
    report.row(SOFTWARE, "JPEG by", f"{used.name} {version}" + f"; torchcodec: {used.instead}" * bool(used.instead))
    if used.name == "Pillow":
        report.problem(f"photos are read half as fast without torchcodec: {used.instead}")


def processes(report: Findings) -> None:
    """Sum over two real processes on the CPU."""
    import torch.distributed as dist

    if not dist.is_available():
        report.problem(f"this torch has no torch.distributed, so only modes of one process train: {cards.REINSTALL}")
        return
    report.row(PROCESSES, "gloo, 2 processes", report.trying("gloo", sums, "gloo", 2) or "FAILS, see below")


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
        report.row(PROCESSES, f"NCCL, {count} cards", report.trying("NCCL", sums, "nccl", count) or "FAILS, see below")


def sums(backend: str, size: int) -> str:
    """That `size` processes of the fork server sum a pattern rightly. Raises SetupError."""
    context, until = fork_server.context(), time.monotonic() + TIMEOUT
    children: list[tuple[ForkServerProcess, Connection]] = []
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        try:
            for rank in range(size):
                answer, mine = context.Pipe(duplex=False)
                words = (backend, rank, size, f"{folder}/store", mine)
                child = context.Process(target=_rank, args=words, daemon=True)
                children.append((child, answer))
                fork_server.start(child)
                mine.close()
            answers = [_answer(rank, *child, until) for rank, child in enumerate(children)]
        finally:
            for child, _ in children:
                if child.pid is not None:
                    child.kill()
                    child.join()
    # A rank that failed by itself comes first.
    reasons = sorted(filter(None, answers), key=lambda reason: "lost another rank" in reason)
    if reasons:
        raise SetupError(f"{backend} does not work between {size} processes here: {reasons[0]}")
    return "sums are correct"


def _answer(rank: int, child: ForkServerProcess, answer: Connection, until: float) -> str:
    """What went wrong in a process, or nothing."""
    if not answer.poll(max(1.0, until - time.monotonic())):
        return f"process {rank} was silent for {TIMEOUT:.0f} s"
    try:
        return str(answer.recv())
    except EOFError:
        child.join(1)
        return f"process {rank} ended with exit code {child.exitcode}"


def _rank(backend: str, rank: int, size: int, store: str, answer: Connection) -> None:
    """Be one of the processes, and answer with what went wrong."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries' own words; the answer says it all
    reason = ""
    try:
        _take_part(backend, rank, size, store)
    except Exception as error:
        reason = explain(error)[0].splitlines()[-1]
    answer.send(reason)
    answer.close()
    os._exit(0)  # a clean exit may abort while gloo's threads run


def _take_part(backend: str, rank: int, size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    from trainer.processes.peers import check_sums, lost_peers

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with lost_peers():
        patience = datetime.timedelta(seconds=TIMEOUT / 2)
        dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=size, timeout=patience)
        check_sums(device, rank, size)
        dist.barrier()


def resources(report: Findings) -> None:
    """What there is to compute and to store with."""
    title = "machine"
    report.row(title, "processor", f"{host.processor()}, {os.cpu_count()} cores, {cores()} for this process")
    quota = host.group_setting("cpu", "cpu.max") or host.group_setting("cpu", "cpu.cfs_quota_us")
    if quota and not quota.startswith(("max", "-1")):
        used, period = map(int, f"{quota} {host.group_setting('cpu', 'cpu.cfs_period_us')}".split()[:2])
        allowed = f"{used / period:.1f} cores: more threads than that only wait (threads=)"
        report.row(title, "cores' quota (cgroup)", allowed)
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
        where = f"nothing can be written into {os.getcwd()}"
        report.problem(f"{where}: cd to a folder of yours, or train with output=FOLDER")


def precisions(report: Findings) -> None:
    """How fast the processor computes in numbers of 16 bits."""
    from trainer.devices import precision  # needs torch

    for name in precision.AUTOCAST:
        times = precision.cpu_speed(name)
        unclear = "not known: the times of convolutions vary too much, as when other programs run; try again"
        text = unclear if math.isnan(times) else f"{times:.2g} times as fast as fp32, in a convolution on one core"
        report.row("processor", name, text)


def try_loader_memory() -> None:
    """Raises SetupError where loader workers would find too little."""
    from trainer.data.workers import worker_counts  # needs torch

    worker_counts.check_shared_memory(BUFFERS)


def limits(report: Findings) -> None:
    """What the system allows this user."""
    for name, number in (("open files", resource.RLIMIT_NOFILE), ("processes", resource.RLIMIT_NPROC)):
        soft, hard = ("unlimited" if n == resource.RLIM_INFINITY else str(n) for n in resource.getrlimit(number))
        report.row("limits", name, soft + f" (at most {hard})" * (soft != hard))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < OPEN_FILES:
        report.problem(f"only {files} files may be open at once, too few for several processes: ulimit -n 4096")
    pids = host.group_setting("pids", "pids.max")
    if pids.isdigit():
        report.row("limits", "processes (cgroup)", pids)


def variables(report: Findings) -> None:
    """Environment variables that torch, NCCL, gloo or we read."""
    for name in sorted(os.environ):
        if TELLING.match(name) and not SECRET.search(name):
            report.row("environment", name, os.environ[name][:300] or '""')

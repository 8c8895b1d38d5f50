"""Versions, whether processes here can talk to each other; and the machine: cores, memory, disk, limits, and the
environment variables that change how training runs."""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import re
import resource
import shlex
import shutil
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from trainer.commands.doctor.findings import Findings
from trainer.devices import cards, host
from trainer.errors import SetupError, explain
from trainer.processes import fork_server
from trainer.processes.peers import shared_memory
from trainer.processes.resources import cores
from trainer.recipe.versions import VERSION, installed

SOFTWARE, PROCESSES, MACHINE = "software", "between processes", "machine"
TIMEOUT = 60.0  # seconds
GIB = 2**30
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
    if len(report.problems) > problems:
        return False
    report.row(SOFTWARE, "other versions", f"{shlex.quote(sys.executable)} -m torch.utils.collect_env")
    from trainer.data.photos.jpeg import codec  # needs torch

    used = codec()
    report.row(SOFTWARE, "JPEG by", f"{used.name} {installed(used.name)}")
    if used.name == "Pillow":
        report.problem(f"photos are read half as fast without torchcodec: {used.instead}")
    return True


def talking(report: Findings, count: int) -> None:
    """Sums over two real processes on the CPU, and over the cards, where there are several."""
    import torch.distributed as dist

    report.row(PROCESSES, "gloo, 2 processes", report.trying("gloo", sums, "gloo", 2) or "FAILS, see below")
    if count > 1 and not dist.is_nccl_available():
        report.problem(cards.NO_NCCL)
    elif count > 1:
        report.row(PROCESSES, f"NCCL, {count} cards", report.trying("NCCL", sums, "nccl", count) or "FAILS, see below")


def sums(backend: str, size: int) -> str:
    """That `size` processes of the fork server sum a pattern rightly. Raises SetupError."""
    context = fork_server.context()
    children, pipes, reasons = [], [], []
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        try:
            for rank in range(size):
                answer, mine = context.Pipe(duplex=False)
                words = (backend, rank, size, f"{folder}/store", mine)
                children.append(context.Process(target=_rank, args=words, daemon=True))
                fork_server.start(children[-1])
                pipes.append(answer)
                mine.close()
            for rank, answer in enumerate(pipes):
                try:
                    silent = f"process {rank} was silent for {TIMEOUT:.0f} s"
                    reasons.append(str(answer.recv()) if answer.poll(TIMEOUT) else silent)
                except EOFError:
                    reasons.append(f"process {rank} ended")
        finally:
            for child in children:
                if child.pid is not None:
                    child.kill()
                    child.join()
    # A rank that failed by itself comes first.
    if reasons := sorted(filter(None, reasons), key=lambda reason: "lost another rank" in reason):
        raise SetupError(f"{backend} does not work between {size} processes here: {reasons[0]}")
    return "sums are correct"


def _rank(backend: str, rank: int, size: int, store: str, answer: Connection) -> None:
    """Be one of the processes, and answer with what went wrong."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries' own words; the answer says it all
    reason = ""
    try:
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
    except Exception as error:
        reason = explain(error)[0].splitlines()[-1]
    answer.send(reason)
    answer.close()
    os._exit(0)  # a clean exit may abort while gloo's threads run


def resources(report: Findings) -> None:
    """What there is to compute and to store with, and what the system allows this user."""
    report.row(MACHINE, "processor", f"{host.processor()}, {os.cpu_count()} cores, {cores()} for this process")
    limit = host.memory_limit()
    within = f", at most {limit / GIB:.1f} GiB here (cgroup)" if limit is not None else ""
    report.row(MACHINE, "memory", f"{host.free_memory() / GIB:.1f} of {host.total_memory() / GIB:.1f} GiB free{within}")
    report.row(MACHINE, "/dev/shm", shared_memory())
    usage = shutil.disk_usage(os.getcwd())
    report.row(MACHINE, "disk of this folder", f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free")
    if usage.free < GIB:
        report.problem("less than 1 GiB of disk is free here: free some, or train with output= on another disk")
    if not os.access(".", os.W_OK):
        where = f"nothing can be written into {os.getcwd()}"
        report.problem(f"{where}: cd to a folder of yours, or train with output=FOLDER")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    report.row(MACHINE, "open files", "unlimited" if files == resource.RLIM_INFINITY else files)
    if files != resource.RLIM_INFINITY and files < OPEN_FILES:
        report.problem(f"only {files} files may be open at once, too few for several processes: ulimit -n 4096")


def variables(report: Findings) -> None:
    """Environment variables that torch, NCCL, gloo or we read."""
    for name in sorted(os.environ):
        if TELLING.match(name) and not SECRET.search(name):
            report.row("environment", name, os.environ[name][:300] or '""')

"""Versions, the parts of torch that training needs, and whether processes here can talk to each other."""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from trainer.commands.doctor.findings import Findings
from trainer.devices import cards
from trainer.errors import SetupError, explain
from trainer.processes import fork_server
from trainer.recipe.versions import VERSION, installed

SOFTWARE, PROCESSES = "software", "between processes"
TIMEOUT = 60.0  # seconds


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


class Group:
    """`size` processes that sum a pattern, from the moment this block is entered; they end with it.

    They come from the fork server, which loads torch while this process does.
    """

    def __init__(self, backend: str, size: int) -> None:
        self.backend, self.size = backend, size

    def __enter__(self) -> Group:
        self.begun = time.monotonic()
        self.folder = tempfile.TemporaryDirectory(prefix="trainer-")
        context = fork_server.context()
        self.children, self.answers = [], []
        for rank in range(self.size):
            answer, mine = context.Pipe(duplex=False)
            where = os.path.join(self.folder.name, "store")
            child = context.Process(target=_rank, args=(self.backend, rank, self.size, where, mine), daemon=True)
            child.start()
            mine.close()
            self.children.append(child)
            self.answers.append(answer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child, answer in zip(self.children, self.answers, strict=True):
            child.kill()
            child.join()
            answer.close()
        self.folder.cleanup()

    def outcome(self) -> str:
        """That it works.

        Raises:
            SetupError: it does not, with the reason of the process that failed by itself.
        """
        reasons = [reason for rank in range(self.size) if (reason := self._answer(rank))]
        if reasons:
            reasons.sort(key=lambda reason: "lost another rank" in reason)  # a rank that failed by itself comes first
            raise SetupError(f"{self.backend} does not work between {self.size} processes here: {reasons[0]}")
        return "sums come out right"

    def _answer(self, rank: int) -> str:
        if not self.answers[rank].poll(max(1.0, self.begun + TIMEOUT - time.monotonic())):
            return f"process {rank} was silent for {TIMEOUT:.0f} s"
        try:
            return str(self.answers[rank].recv())
        except EOFError:
            self.children[rank].join(1)
            return f"process {rank} ended with exit code {self.children[rank].exitcode}"


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
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=TIMEOUT / 2),
        )
        check_sums(device, rank, size)
        dist.barrier()

"""`python -m trainer doctor`: what this machine offers to training, and what is wrong with it. It repairs nothing.

Versions; each card, and whether it computes and copies rightly; whether processes here can talk to each other; cores,
memory, disk, limits, and the environment variables that change how training runs.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import resource
import shlex
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from trainer.devices import cards, health, host
from trainer.errors import PeerError, RecipeError, SetupError, in_one_line
from trainer.processes.peers import check_sums, lost_peers, shared_memory
from trainer.processes.resources import cores
from trainer.processes.terminal import say
from trainer.recipe.versions import VERSION, installed

if TYPE_CHECKING:
    from trainer.commands.trials.measuring import Measurer

SOFTWARE, CARDS, PROCESSES, MACHINE = "software", "cards", "between processes", "machine"
TIMEOUT = 60.0  # seconds
GIB = 2**30
OPEN_FILES = 512
BUFFERS = 2**28  # bytes that loader workers share for a usual batch of photos
ALIKE = 0.85  # times as fast as the fastest card that others may be, without a word of it
TELLING = re.compile(
    r"(CUDA|NVIDIA|NCCL|GLOO|TORCH|PYTORCH|CUBLAS|HIP|ROCR|OMP|MKL|KMP|GOMP|TRAINER|SLURM|PET|UCX|TORCHELASTIC)_"
    r"|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)$|(MASTER_(ADDR|PORT)|NPROC|NNODES|NODE_RANK|LD_LIBRARY_PATH|LD_PRELOAD)$"
)
SECRET = re.compile("TOKEN|SECRET|PASS|KEY|JWT")
P = ParamSpec("P")
T = TypeVar("T")


def command(words: Sequence[str]) -> int:
    """Print everything that the checks at a run's start see; 0, or 3 where something is wrong."""
    if words:
        raise RecipeError(f"doctor takes no words, not '{words[0][:80]}': type python -m trainer doctor")
    report = examine()
    say(report.text())
    return SetupError.code if report.problems else 0


def examine() -> Findings:
    """Look at everything. A check that fails becomes a problem of one line, and the others follow."""
    report = Findings()
    if report.trying("software", versions, report):
        cards = report.trying("cards", check_cards, report) or 0
        report.trying("processes", talking, report, cards)
        from trainer.data.workers import worker_counts  # needs torch

        report.trying("shared memory", worker_counts.check_shared_memory, BUFFERS)
    report.trying("machine", resources, report)
    report.trying("environment", variables, report)
    return report


@dataclass
class Findings:
    """The report of `doctor` as it grows."""

    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def row(self, section: str, name: str, value: object) -> None:
        self.sections.setdefault(section, []).append((name, " ".join(str(value).split())))

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    def trying(self, what: str, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `check` returns; None and a problem of one line if it fails."""
        try:
            return check(*args, **kwargs)
        except Exception as error:
            line, code = in_one_line(error)
            self.problem(f"{what}: {line}" if code == 1 else line)
            return None

    def text(self) -> str:
        """The report: sections of aligned rows, and last what is wrong."""
        width = max((len(name) for rows in self.sections.values() for name, _ in rows), default=0)
        lines = []
        for title, rows in self.sections.items():
            lines += [title, *(_wrapped(f"  {name:{width}}  ", value) for name, value in rows), ""]
        if not self.problems:
            return "\n".join([*lines, "all good"])
        lines.append("1 problem:" if len(self.problems) == 1 else f"{len(self.problems)} problems:")
        return "\n".join([*lines, *(_wrapped(f"{n}. ", problem) for n, problem in enumerate(self.problems, 1))])


def _wrapped(start: str, text: str) -> str:
    """Lines of a text that begins after `start`; words and paths stay whole, to be copied."""
    indent = " " * len(start)
    return textwrap.fill(text, 120, initial_indent=start, subsequent_indent=indent, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


def versions(report: Findings) -> bool:
    """Of what training uses itself; returns whether torch and torchvision could be loaded."""
    problems = len(report.problems)
    report.row(SOFTWARE, "trainer", f"{VERSION} ({Path(__file__).parents[1]})")
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


def check_cards(report: Findings) -> int:
    """Rows of every card and of the copies between them; returns how many there are where all compute."""
    here = cards.detect()
    if here.fault is not None:
        report.problem(str(here.fault))
    if not here.count:
        report.row(CARDS, "none", "torch can use none of those here" if here.fault else "training runs on the CPU")
        return 0
    import torch

    devices, before = [torch.device("cuda", index) for index in range(here.count)], len(report.problems)
    for device in devices:
        known = len(report.problems)
        report.trying(str(device), health.check_card, device, here.count)
        computes = "computes correctly" if len(report.problems) == known else "CANNOT BE USED"
        free, total = report.trying(str(device), torch.cuda.mem_get_info, device) or (0, 0)
        name = report.trying(str(device), torch.cuda.get_device_name, device)
        report.row(CARDS, str(device), f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, {computes}")
    if len(report.problems) > before:
        return 0
    if ways := list(permutations(devices, 2)):
        report.trying("copies between cards", health.check_copies, ways)
        right = len(report.problems) == before
        report.row(CARDS, "copies", f"right in all {len(ways)} ways" if right else "WRONG, see below")
        speeds = [report.trying(f"speed of {device}", health.speed, device) or 0.0 for device in devices]
        report.row(CARDS, "speed", how_alike(list(map(str, devices)), speeds))
    return here.count


def how_alike(names: Sequence[str], speeds: Sequence[float]) -> str:
    """Whether the cards are as fast, and what ranks of unlike ones gain by unequal parts of a batch."""
    slow, fast = speeds.index(min(speeds)), speeds.index(max(speeds))
    if speeds[slow] >= ALIKE * speeds[fast] or not speeds[slow]:
        return "all as fast, in matrix products" if speeds[slow] else "not measured"
    gain = sum(speeds) / len(speeds) / speeds[slow]
    return (
        f"{names[slow]} is {speeds[slow] / speeds[fast]:.2g} times as fast as {names[fast]}, in matrix products: "
        f"shares=auto gives up to {gain:.2f} times the images/s of equal parts"
    )


def talking(report: Findings, count: int) -> None:
    """Sums over two real processes on the CPU, and over the cards, where there are several."""
    import torch.distributed as dist

    talk = report.trying("gloo", sums, "gloo", ["cpu"] * 2)
    report.row(PROCESSES, "gloo, 2 processes", talk or "FAILS, see below")
    if count > 1 and not dist.is_nccl_available():
        report.problem(cards.NO_NCCL)
    elif count > 1 and talk:  # cards meet over it
        named = [f"cuda:{number}" for number in range(count)]
        report.row(PROCESSES, f"NCCL, {count} cards", report.trying("NCCL", sums, "nccl", named) or "FAILS, see below")


def sums(backend: str, devices: Sequence[str]) -> str:
    """That processes on these devices sum a pattern rightly. Raises SetupError."""
    from trainer.commands.trials.measuring import answers  # needs torch

    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        try:
            answers(_sum, devices, 1, Path(folder) / "ranks", timeout=TIMEOUT)
        except PeerError as error:
            raise SetupError(f"{backend} does not work between {len(devices)} processes here: {error}") from None
    return "sums are correct"


def _sum(here: Measurer) -> None:
    with lost_peers():
        check_sums(here.device, here.rank, here.count)


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

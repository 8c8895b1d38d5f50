"""`python -m trainer doctor`: report the hardware and software of this machine, and its problems.

The report lists versions, GPUs, cores, memory, disk, limits, and environment variables that change
training. It also says whether the GPUs compute and copy correctly, and whether processes can
communicate.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainer.devices import cards, health, host
from trainer.distributed.peers import check_sums, describe_shared_memory, translate_peer_errors
from trainer.errors import PeerError, RecipeError, SetupError, explain_in_one_line
from trainer.processes.resources import count_cores
from trainer.processes.terminal import say
from trainer.telemetry.readable import format_count, wrap
from trainer.versions import VERSION, read_version

if TYPE_CHECKING:
    from trainer.commands.trials.measuring import Measurer

SOFTWARE = "software"
CARDS = "cards"
PROCESSES = "between processes"
MACHINE = "machine"
# Timeout in seconds of each check of communication.
TIMEOUT = 60.0
GIB = 2**30
# A user's limit on the open files of a process is reported as a problem if it is below this number.
OPEN_FILES = 512
# Bytes of shared memory that loader workers need for a typical batch of photos. If less is free,
# the report names this as a problem.
BUFFERS = 2**28
# GPUs count as equally fast if the slowest one has at least this fraction of the fastest one's
# speed.
ALIKE = 0.85
# Matches the names of the environment variables to report.
TELLING = re.compile(
    r"(CUDA|NVIDIA|NCCL|GLOO|TORCH|PYTORCH|CUBLAS|HIP|ROCR|OMP|MKL|KMP|GOMP|TRAINER|SLURM|PET|UCX"
    r"|TORCHELASTIC)_"
    r"|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)$"
    r"|(MASTER_(ADDR|PORT)|NPROC|NNODES|NODE_RANK|LD_LIBRARY_PATH|LD_PRELOAD)$"
)
SECRET = re.compile("TOKEN|SECRET|PASS|KEY|JWT")
T = TypeVar("T")


def command(words: Sequence[str]) -> int:
    """Print the report, and return exit code 0, or 3 if there is a problem."""
    if words:
        raise RecipeError(
            f"doctor accepts no arguments, not '{words[0][:80]}': type python -m trainer doctor"
        )
    report = examine()
    say(report.text())
    return SetupError.code if report.problems else 0


def examine() -> Findings:
    """Run the checks and return the report. A check that fails is reported as a problem.

    If torch or torchvision cannot be imported, the checks that need them are left out.
    """
    report = Findings()
    if report.trying("software", report_versions, report):
        cards = report.trying("cards", check_cards, report) or 0
        report.trying("processes", check_communication, report, cards)
        # Imported only now, because the module imports torch, which may be broken.
        from trainer.memory import device

        report.trying("shared memory", device.check_shared_memory, BUFFERS)
    report.trying("machine", report_resources, report)
    report.trying("environment", report_variables, report)
    return report


@dataclass
class Findings:
    """Report of `doctor`.

    Attributes:
        sections: Rows (name, value) of each section, by its title.
        problems: Problems, one line each.
    """

    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def row(self, section: str, name: str, value: object) -> None:
        text = " ".join(str(value).split())
        self.sections.setdefault(section, []).append((name, text))

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    def trying(self, what: str, check: Callable[..., T], *args: object) -> T | None:
        """Run a check.

        Args:
            what: Name of the check, which starts the line of an unexpected error.
            check: Function to call with `args`.

        Returns:
            The result of the check; None if the check raised an error, which becomes a problem.
        """
        try:
            return check(*args)
        except Exception as error:
            line, code = explain_in_one_line(error)
            # Exit code 1 means an unexpected error, whose message does not name the check.
            if code == 1:
                line = f"{what}: {line}"
            self.problem(line)
            return None

    def text(self) -> str:
        """Return the report: sections of aligned rows, then the problems."""
        widths = [max(len(name) for name, _ in rows) for rows in self.sections.values()]
        width = max(widths, default=0)
        lines = []
        for title, rows in self.sections.items():
            lines.append(title)
            lines += [wrap(f"  {name:{width}}  ", value) for name, value in rows]
            lines.append("")
        if self.problems:
            lines.append(f"{format_count(len(self.problems), 'problem')}:")
        else:
            lines.append("all good")
        lines += [wrap(f"{n}. ", problem) for n, problem in enumerate(self.problems, 1)]
        return "\n".join(lines)


def report_versions(report: Findings) -> bool:
    """Report the versions of the main packages.

    Returns:
        Whether torch and torchvision can be imported.
    """
    problems = len(report.problems)
    report.row(SOFTWARE, "trainer", f"{VERSION} ({Path(__file__).parents[1]})")
    python = f"{platform.python_version()} ({sys.executable}), {platform.platform()}"
    report.row(SOFTWARE, "Python", python)
    for name in ("torch", "torchvision"):
        report.row(SOFTWARE, name, read_version(name))
        report.trying(name, importlib.import_module, name)
    if len(report.problems) > problems:
        return False
    details = f"{shlex.quote(sys.executable)} -m torch.utils.collect_env"
    report.row(SOFTWARE, "other versions", details)
    # Imported here, because this module imports torch, which has been found to work by now.
    from trainer.data.photos.jpeg import get_codec

    jpeg = get_codec()
    report.row(SOFTWARE, "JPEG by", f"{jpeg.name} {read_version(jpeg.name)}")
    if jpeg.name == "Pillow":
        report.problem(f"photos are read half as fast without torchcodec: {jpeg.instead}")
    return True


def check_cards(report: Findings) -> int:
    """Check and report every GPU, the copies between the GPUs, and their speeds.

    Returns:
        The number of GPUs; 0 if any check of a single GPU failed.
    """
    here = cards.detect()
    problems = report.problems
    if here.fault:
        report.problem(str(here.fault))
    if not here.count:
        reason = "training runs on the CPU"
        if here.fault:
            reason = "torch can use none of those here"
        report.row(CARDS, "none", reason)
        return 0
    import torch

    devices = [torch.device("cuda", index) for index in range(here.count)]
    before = len(problems)
    for device in devices:
        title = str(device)
        before_card = len(problems)
        report.trying(title, health.check_card, device, here.count)
        computes = "CANNOT BE USED"
        if len(problems) == before_card:
            computes = "computes correctly"
        free, total = report.trying(title, torch.cuda.mem_get_info, device) or (0, 0)
        name = report.trying(title, torch.cuda.get_device_name, device)
        memory = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
        report.row(CARDS, title, f"{name}, {memory}, {computes}")
    if len(problems) > before:
        return 0
    pairs = list(permutations(devices, 2))
    if pairs:
        report.trying("copies between cards", health.check_copies, pairs)
        copies = "WRONG, see below"
        if len(problems) == before:
            copies = f"right in all {len(pairs)} ways"
        report.row(CARDS, "copies", copies)
        speeds = [
            report.trying(f"speed of {device}", health.measure_speed, device) or 0.0
            for device in devices
        ]
        report.row(CARDS, "speed", compare_speeds(list(map(str, devices)), speeds))
    return here.count


def compare_speeds(names: Sequence[str], speeds: Sequence[float]) -> str:
    """Return a phrase that compares the speeds of GPUs.

    If the speeds differ, the phrase says how much shares=auto gains at most.

    Args:
        names: Name of each GPU.
        speeds: Speed of each GPU in matrix products; 0 if it could not be measured.
    """
    slow = speeds.index(min(speeds))
    fast = speeds.index(max(speeds))
    if not speeds[slow]:
        return "not measured"
    if speeds[slow] >= ALIKE * speeds[fast]:
        return "all as fast, in matrix products"
    gain = sum(speeds) / len(speeds) / speeds[slow]
    return (
        f"{names[slow]} is {speeds[slow] / speeds[fast]:.2g} times as fast as {names[fast]}, in "
        f"matrix products: shares=auto gives up to {gain:.2f} times the images/s of equal parts"
    )


def check_communication(report: Findings, count: int) -> None:
    """Check sums over two processes on the CPU, and over all `count` GPUs if there are several."""
    import torch.distributed as dist

    gloo = report.trying("gloo", sum_over_processes, "gloo", ["cpu"] * 2)
    report.row(PROCESSES, "gloo, 2 processes", gloo or "FAILS, see below")
    if count > 1 and not dist.is_nccl_available():
        report.problem(cards.NO_NCCL)
    # The processes of the GPUs connect to each other through gloo first, so NCCL is checked only if
    # gloo works.
    elif count > 1 and gloo:
        devices = [f"cuda:{number}" for number in range(count)]
        nccl = report.trying("NCCL", sum_over_processes, "nccl", devices)
        report.row(PROCESSES, f"NCCL, {count} cards", nccl or "FAILS, see below")


def sum_over_processes(backend: str, devices: Sequence[str]) -> str:
    """Check that processes on these devices sum a pattern correctly.

    Args:
        backend: Name of the backend for the error message. The devices determine which backend is
            used.
        devices: Device of each process.

    Returns:
        A phrase for the report.

    Raises:
        SetupError: A sum is wrong, or a process failed.
    """
    # Imported here, because this module imports torch, which may be broken.
    from trainer.commands.trials.measuring import measure_on_all

    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        try:
            measure_on_all(_sum, devices, 1, Path(folder) / "ranks", timeout=TIMEOUT)
        except PeerError as error:
            raise SetupError(
                f"{backend} does not work between {len(devices)} processes here: {error}"
            ) from None
    return "sums are correct"


def _sum(here: Measurer) -> None:
    with translate_peer_errors():
        check_sums(here.device, here.rank, here.count)


def report_resources(report: Findings) -> None:
    """Report processor, memory, disk, and the limits of this user."""
    processor = (
        f"{host.read_processor_name()}, {os.cpu_count()} cores, {count_cores()} for this process"
    )
    report.row(MACHINE, "processor", processor)
    memory = f"{host.free_memory() / GIB:.1f} of {host.total_memory() / GIB:.1f} GiB free"
    limit = host.memory_limit()
    if limit is not None:
        memory += f", at most {limit / GIB:.1f} GiB here (cgroup)"
    report.row(MACHINE, "memory", memory)
    report.row(MACHINE, "/dev/shm", describe_shared_memory())
    usage = shutil.disk_usage(os.getcwd())
    disk = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    report.row(MACHINE, "disk of this folder", disk)
    if usage.free < GIB:
        report.problem(
            "less than 1 GiB of disk is free here: free some, or train with output= on another disk"
        )
    if not os.access(".", os.W_OK):
        report.problem(
            f"nothing can be written into {os.getcwd()}: cd to a folder of yours, or train with "
            "output=FOLDER"
        )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = files == resource.RLIM_INFINITY
    report.row(MACHINE, "open files", "unlimited" if is_unlimited else files)
    # RLIM_INFINITY means that there is no limit. Its value is -1, which must not count as too few.
    if 0 <= files < OPEN_FILES:
        report.problem(
            f"only {files} files may be open at once, too few for several processes: ulimit -n 4096"
        )


def report_variables(report: Findings) -> None:
    """Report environment variables that change training, except those that may hold a secret."""
    for name in sorted(os.environ):
        if TELLING.match(name) and not SECRET.search(name):
            report.row("environment", name, os.environ[name][:300] or '""')

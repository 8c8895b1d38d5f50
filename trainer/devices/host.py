"""This machine's processor and memory, the limits that a container sets to them, and what keeps it from computing.

Counters of the kernel are read; where there are none, nothing is known.
"""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # bytes: a control group with more has no limit
TICK = 1 / (os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100)  # seconds
READY = 0.2  # share of the time that a thread was ready to compute and did not get a core, from which on we look why


def processor() -> str:
    """What it is called."""
    with suppress(OSError, StopIteration), open(PROC / "cpuinfo") as info:
        return next(line.partition(":")[2].strip() for line in info if line.startswith("model name"))
    return platform.processor() or platform.machine()


def total_memory() -> int:
    """Bytes of the whole computer."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory() -> int:
    """Bytes that this process can still have: what the computer has left, and every control group around it."""
    available = _table(PROC / "meminfo").get("MemAvailable")
    free = total_memory() if available is None else available * 1024
    for folder in _groups("memory"):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None:
            held = _table(folder / "memory.stat")  # cached files are given up when memory is wanted
            free = min(free, max(0, limit - used + held.get("total_inactive_file", held.get("inactive_file", 0))))
    return free


def memory_limit() -> int | None:
    """Bytes that the smallest control group around this process may have; None where none has a limit."""
    limits = [_number(folder, "memory.max", "memory.limit_in_bytes") for folder in _groups("memory")]
    return min((limit for limit in limits if limit is not None and limit < UNLIMITED), default=None)


def _groups(controller: str) -> list[Path]:
    """Folders of this process's control group and of those around it, of both versions, from the inside out."""
    lines = ["0::/", f"1:{controller}:/"]  # in a container its group is the outermost
    lines += _text(PROC / "self" / "cgroup").splitlines()
    folders = set[Path]()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            inner = Path(path.lstrip("/"))
            home = GROUPS / controller if controllers else GROUPS
            folders |= {home / folder for folder in (inner, *inner.parents)}
    return sorted(folders, key=lambda folder: -len(folder.parts))


def _number(folder: Path, *names: str) -> int | None:
    for name in names:
        with suppress(OSError, ValueError):  # no such file, or "max"
            return int((folder / name).read_text())
    return None


def _table(path: Path) -> dict[str, int]:
    """Names and numbers, a line each."""
    with suppress(OSError, ValueError):
        rows = map(str.split, path.read_text().splitlines())
        return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1}
    return {}


# --- other programs on its cores -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strain:
    """What kept the machine from computing since a moment; nothing where it is not known."""

    seconds: float = 0.0  # since then
    others: float = 0.0  # share of the time of the cores that other programs had, while this one was ready to compute


class StrainMeter:
    """Counts from its making on, while `processes` of this machine train together. Costs nothing meanwhile."""

    def __init__(self, processes: int = 1) -> None:
        self._processes, self._begun = processes, time.perf_counter()
        self._spent, self._waits, self._busy, self._stolen = time.process_time(), _waits(), *core_seconds()

    def read(self) -> Strain:
        """What happened so far."""
        seconds = max(1e-9, time.perf_counter() - self._begun)
        ready = max((waited - self._waits.get(thread, 0.0) for thread, waited in _waits().items()), default=0.0)
        return Strain(seconds, self._others(seconds, ready))

    def _others(self, seconds: float, ready: float) -> float:
        (busy, stolen), cores = core_seconds(), len(_affinity())
        if (stolen := (stolen - self._stolen) / cores) >= READY * seconds:  # by other machines of the same host
            return min(1.0, stolen / seconds)
        if ready < READY * seconds:  # also who uses few threads on purpose waits for no core
            return 0.0
        family = os.getppid() if self._processes > 1 else os.getpid()
        spent = _family_seconds(family) - self._processes * self._spent  # the others have started up alike
        return max(0.0, (busy - self._busy - spent) / cores / seconds)


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""


def _affinity() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _waits() -> dict[str, float]:
    """Seconds that each thread of this process was ready and had no core."""
    waits = {}
    for path in PROC.glob("self/task/*/schedstat"):
        fields = _text(path).split()
        if len(fields) == 3:
            waits[path.parent.name] = int(fields[1]) / 1e9
    return waits


def core_seconds() -> tuple[float, float]:
    """Seconds that any program had of the cores of this process, and those that other machines stole."""
    busy = stolen = 0.0
    mine = {f"cpu{core}" for core in _affinity()}
    for line in _text(PROC / "stat").splitlines():
        name, *fields = line.split()
        if name in mine and len(fields) >= 8:
            user, nice, system, _, _, interrupts, soft, steal = (TICK * int(field) for field in fields[:8])
            busy, stolen = busy + user + nice + system + interrupts + soft, stolen + steal
    return busy, stolen


def _family_seconds(root: int) -> float:
    """Seconds of a core that a process and those below it had; of one above several ranks, only theirs."""
    seconds, parents = {}, {}
    for path in PROC.glob("[0-9]*/stat"):
        fields = _text(path).rpartition(")")[2].split()  # a program's name may hold anything
        if len(fields) > 14:
            pid = int(path.parent.name)
            parents[pid], seconds[pid] = int(fields[1]), TICK * sum(map(int, fields[11:15]))

    def below(pid: int) -> bool:
        while pid in parents and pid != root:
            pid = parents[pid]
        return pid == root

    return sum(spent for pid, spent in seconds.items() if below(pid) and (pid != root or root == os.getpid()))

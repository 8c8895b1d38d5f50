"""Processor, memory and container limits of this machine, and CPU load by other programs.

The load comes from counters of the Linux kernel. On systems without them, it is not measured.
"""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
# Memory limits of at least this number of bytes are ignored: a control group without a limit
# reports a huge number.
UNLIMITED = 1 << 60
# Seconds per tick of the kernel's counters.
TICK = 1 / (os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100)
# The load by other programs counts as 0 unless a thread of this process waits for a core, or other
# virtual machines use the cores, for at least this fraction of the time.
MAX_WAITING = 0.2


def read_processor_name() -> str:
    """Return the name of the processor."""
    for line in _read_text(PROC / "cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def total_memory() -> int:
    """Return the size of the computer's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory() -> int:
    """Return the number of bytes that this process can still allocate.

    This is the free memory of the computer, or of one of the process's control groups if that is
    less.
    """
    available = _read_table(PROC / "meminfo").get("MemAvailable")
    free = total_memory() if available is None else available * 1024
    for folder, limit in _iterate_limits():
        used = _read_number(folder, "memory.current", "memory.usage_in_bytes")
        if used is not None:
            # Cached files count as free, because the kernel evicts them when memory is needed. The
            # name of their key depends on the version of control groups.
            table = _read_table(folder / "memory.stat")
            cached = table.get("total_inactive_file", table.get("inactive_file", 0))
            free = min(free, max(0, limit - used + cached))
    return free


def memory_limit() -> int | None:
    """Return the lowest memory limit, in bytes, of this process's control groups.

    Without a limit in any group, return None.
    """
    return min((limit for _, limit in _iterate_limits()), default=None)


def _iterate_limits() -> Iterator[tuple[Path, int]]:
    """Yield the directory and the memory limit in bytes of this process's control groups.

    Groups without a limit are left out. Both versions of control groups (cgroup v1 and v2) are
    read.
    """
    # Always include the root directories: in a container, they contain the files of the process's
    # own group.
    lines = ["0::/", "1:memory:/"]
    lines += _read_text(PROC / "self" / "cgroup").splitlines()
    folders = set[Path]()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            inner = Path(path.lstrip("/"))
            root = GROUPS / "memory" if controllers else GROUPS
            folders |= {root / folder for folder in (inner, *inner.parents)}
    for folder in folders:
        limit = _read_number(folder, "memory.max", "memory.limit_in_bytes")
        if limit is not None and limit < UNLIMITED:
            yield folder, limit


def _read_number(folder: Path, *names: str) -> int | None:
    for name in names:
        # The file may not exist, or may contain "max" instead of a number.
        with suppress(OSError, ValueError):
            return int((folder / name).read_text())
    return None


def _read_table(path: Path) -> dict[str, int]:
    """Return the number in each line of a file by the name before it; {} if it is unreadable."""
    table = {}
    with suppress(OSError, ValueError):
        for fields in map(str.split, path.read_text().splitlines()):
            if len(fields) > 1:
                table[fields[0].rstrip(":")] = int(fields[1])
        return table
    return {}


def _read_text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""


# --- Load by other programs


@dataclass(frozen=True)
class Strain:
    """Load by other programs since the creation of a `StrainMeter`; zeros if it is unknown.

    Attributes:
        seconds: Seconds since the creation of the meter.
        others: Fraction of the cores' time, at least 0. If other virtual machines used at least the
            fraction `MAX_WAITING`, it is the fraction that they used. Otherwise, it is the fraction
            that other programs of this machine used, or 0 if no thread of this process waited for
            a core for at least `MAX_WAITING` of the time.
    """

    seconds: float = 0.0
    others: float = 0.0


class StrainMeter:
    """Measure the CPU time of other programs while `processes` processes of this machine train.

    The measurement starts when the meter is created. It costs no time until `read` is called.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self.start_time = time.perf_counter()
        self._own_seconds = time.process_time()
        self._waits = _read_waits()
        self._busy, self._stolen = read_core_seconds()

    def read(self) -> Strain:
        """Return the load by other programs since the creation of the meter."""
        seconds = time.perf_counter() - self.start_time
        longest_wait = 0.0
        for thread, waited in _read_waits().items():
            longest_wait = max(longest_wait, waited - self._waits.get(thread, 0.0))
        return Strain(seconds, self._measure_others(seconds, longest_wait))

    def _measure_others(self, seconds: float, longest_wait: float) -> float:
        # The kernel counts in ticks, which are too coarse for a short time.
        if seconds < 10 * TICK:
            return 0.0
        busy, stolen = read_core_seconds()
        cores = len(list_cores())
        # Stolen time is used by other virtual machines on the same host.
        stolen = (stolen - self._stolen) / cores
        if stolen >= MAX_WAITING * seconds:
            return min(1.0, stolen / seconds)
        # If no thread waited for a core for long, other programs did not slow this process down.
        if longest_wait < MAX_WAITING * seconds:
            return 0.0
        root = os.getppid() if self._processes > 1 else os.getpid()
        # Subtract the CPU time from before the measurement. Each process is assumed to have used as
        # much as this one.
        own_seconds = _read_family_seconds(root) - self._processes * self._own_seconds
        return max(0.0, (busy - self._busy - own_seconds) / cores / seconds)


def list_cores() -> set[int]:
    """Return the indices of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _read_waits() -> dict[str, float]:
    """Return the seconds that each thread of this process has waited for a core."""
    waits = {}
    for path in PROC.glob("self/task/*/schedstat"):
        fields = _read_text(path).split()
        if len(fields) == 3:
            waits[path.parent.name] = int(fields[1]) / 1e9
    return waits


def read_core_seconds() -> tuple[float, float]:
    """Return the times of the cores that this process may use, summed since the machine started.

    Returns:
        (busy, stolen): the seconds in which the cores ran any program of this machine, and the
        seconds in which the host ran other virtual machines on them instead.
    """
    busy = stolen = 0.0
    cores = {f"cpu{core}" for core in list_cores()}
    for line in _read_text(PROC / "stat").splitlines():
        name, *fields = line.split()
        if name in cores and len(fields) >= 8:
            seconds = [TICK * int(field) for field in fields[:8]]
            user, nice, system, _, _, interrupts, soft_interrupts, steal = seconds
            busy = busy + user + nice + system + interrupts + soft_interrupts
            stolen += steal
    return busy, stolen


def _read_family_seconds(root: int) -> float:
    """Return the CPU seconds of a process and its descendants.

    The seconds of `root` itself do not count if it is the parent of this process.
    """
    seconds = {}
    parents = {}
    for path in PROC.glob("[0-9]*/stat"):
        # The name of a program is in parentheses and may contain spaces and parentheses.
        fields = _read_text(path).rpartition(")")[2].split()
        if len(fields) > 14:
            pid = int(path.parent.name)
            parents[pid] = int(fields[1])
            seconds[pid] = TICK * sum(map(int, fields[11:15]))
    total = 0.0
    for pid, spent in seconds.items():
        ancestor = pid
        while ancestor in parents and ancestor != root:
            ancestor = parents[ancestor]
        if ancestor == root and (pid != root or root == os.getpid()):
            total += spent
    return total

"""What keeps this machine from computing: other programs on its cores.

Counters of the kernel are read at two moments; where there are none, nothing is known.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICK = 1 / (os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100)  # seconds
READY = 0.2  # share of the time that a thread was ready to compute and did not get a core, from which on we look why


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

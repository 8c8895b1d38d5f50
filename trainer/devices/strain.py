"""What keeps this machine from computing: other programs on its cores, a container's quota, heat.

Counters of the kernel and of NVIDIA's library are read at two moments; where there are none, nothing is known.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.devices import host

if TYPE_CHECKING:
    import torch

PROC = Path("/proc")
TICK = 1 / (os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100)  # seconds
READY = 0.2  # share of the time that a thread was ready to compute and did not get a core, from which on we look why
# Why a card slows itself down, by NVML's bits. 0x4, the power limit, is what a card at full work runs into.
THROTTLES = {0x20: "heat", 0x40: "heat", 0x80: "the power supply"}


@dataclass(frozen=True)
class Strain:
    """What kept the machine from computing since a moment; nothing where it is not known."""

    seconds: float = 0.0  # since then
    others: float = 0.0  # share of the time of the cores that other programs had, while this one was ready to compute
    ready: float = 0.0  # share of the time that a thread of this process was ready to compute and had no core
    quota: float | None = None  # cores that the container is allowed, where that stopped its processes
    throttled: str = ""  # what slowed a device down, as in "cuda:0 by heat"


class StrainMeter:
    """Counts from its making on. Costs nothing meanwhile."""

    def __init__(self, devices: Sequence[torch.device] = (), processes: int = 1) -> None:
        """`devices` are those that this process drives; `processes` of this machine train together."""
        self._processes, self._begun = processes, time.perf_counter()
        self._spent, self._waits, self._busy, self._stolen = time.process_time(), _waits(), *_cores()
        self._periods = _periods()
        self._cards = {str(device): asking(device) for device in devices if device.type == "cuda"}
        self._looks, self._slow = 0, dict.fromkeys(self._cards, 0)

    def read(self) -> Strain:
        """What happened so far."""
        seconds = max(1e-9, time.perf_counter() - self._begun)
        ready = max((waited - self._waits.get(thread, 0.0) for thread, waited in _waits().items()), default=0.0)
        others = self._others(seconds, ready)
        return Strain(seconds, others, min(1.0, ready / seconds), self._quota(), self._throttled())

    def _others(self, seconds: float, ready: float) -> float:
        (busy, stolen), cores = _cores(), len(_affinity())
        if (stolen := (stolen - self._stolen) / cores) >= READY * seconds:  # by other machines of the same host
            return min(1.0, stolen / seconds)
        if ready < READY * seconds:  # also who uses few threads on purpose waits for no core
            return 0.0
        family = os.getppid() if self._processes > 1 else os.getpid()
        spent = _family_seconds(family) - self._processes * self._spent  # the others have started up alike
        return max(0.0, (busy - self._busy - spent) / cores / seconds)

    def _quota(self) -> float | None:
        before, now = self._periods, _periods()
        if before is None or now is None or now[0] - before[0] < 10:  # a period is 0.1 s
            return None
        return now[2] if now[1] - before[1] >= READY * (now[0] - before[0]) else None

    def _throttled(self) -> str:
        self._looks += 1
        slow = []
        for name, ask in self._cards.items():
            bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
            causes = [cause for bit, cause in THROTTLES.items() if bits & bit]
            self._slow[name] += bool(causes)
            if causes and 2 * self._slow[name] > self._looks > 1:  # once is a moment
                slow.append(f"{name} by {causes[0]}")
        return ", ".join(slow)


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


def _cores() -> tuple[float, float]:
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


def _periods() -> tuple[int, int, float] | None:
    """Of the container's quota: periods, those in which it stopped the processes, and the cores that it allows."""
    limit = host.group_setting("cpu", "cpu.max").split()
    counts = dict(re.findall(r"(\w+) (\d+)", host.group_setting("cpu", "cpu.stat")))
    if len(limit) == 2 and limit[0].isdigit() and {"nr_periods", "nr_throttled"} <= counts.keys():
        return int(counts["nr_periods"]), int(counts["nr_throttled"]), int(limit[0]) / int(limit[1])
    return None


def asking(device: torch.device) -> Callable[..., Any]:
    """Asks NVIDIA's management library of a card: a function's name and arguments give its answer.

    None for what the card does not know, and for everything where nvidia-ml-py is not installed or lacks the card.
    """
    try:
        import pynvml
        import torch

        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception:  # whatever it is, it is no reason to end a run
        return lambda *_: None

    def ask(function: str, *args: Any) -> Any:
        with suppress(Exception):  # not every card knows everything
            return getattr(pynvml, function)(card, *args)
        return None

    return ask

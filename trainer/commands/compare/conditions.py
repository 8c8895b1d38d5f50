"""What the figures were measured on, and whether anything else was running there meanwhile."""

from __future__ import annotations

import os
import platform
import resource
import time

from trainer.commands.compare.comparison_report import MachineFigures
from trainer.devices import cards, host
from trainer.processes import resources

BUSY = 0.2  # cores: what others may use before it is worth a word


def this_machine() -> MachineFigures:
    """Processor, cores, memory, GPUs and system."""
    import torch

    gpus = [torch.cuda.get_device_name(n) for n in range(cards.detect().count)]
    return MachineFigures(host.processor(), resources.cores(), host.total_memory(), gpus, platform.platform())


class Others:
    """How many cores other programs kept busy since this was made."""

    def __init__(self) -> None:
        self.begun, self.busy, self.ours = time.perf_counter(), _busy(), _ours()

    def cores(self) -> float | None:
        """None where the kernel does not tell, or this process may use only a part of the cores."""
        now = _busy()
        if now is None or self.busy is None or resources.cores() != os.cpu_count():
            return None
        return max(0.0, (now - self.busy - _ours() + self.ours) / (time.perf_counter() - self.begun))

    def words(self) -> list[str]:
        """A warning, where one is due."""
        cores = self.cores()
        if cores is None or cores < BUSY:
            return []
        return [
            f"other programs kept {cores:.1f} of {os.cpu_count()} cores busy meanwhile: better compare without them"
        ]


def _busy() -> float | None:
    """Seconds that all cores together have worked since the machine started."""
    try:
        with open("/proc/stat") as stat:
            user, nice, system, _, _, irq, softirq, *_ = map(int, stat.readline().split()[1:])
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def _ours() -> float:
    """Those of this process and the ended ones that it started."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)

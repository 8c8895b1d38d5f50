"""The keys of a comparison: what `compare` returns and compare.json holds. They are stable. And what the figures were
measured on, and whether anything else was running there meanwhile."""

from __future__ import annotations

import os
import platform
import resource
import time
from dataclasses import asdict, dataclass
from typing import Any

from trainer.commands.compare.entries import Sweep
from trainer.commands.compare.exactness import Exactness
from trainer.commands.compare.running import Length
from trainer.commands.compare.significance import Difference
from trainer.devices import cards, host
from trainer.processes import resources

BUSY = 0.2  # cores: what others may use before it is worth a word


@dataclass(frozen=True)
class ComparisonRequest:
    """What a comparison was asked for; `settings` are those of its recipe, resolved."""

    recipe: str | dict[str, Any]
    modes: list[str] | None
    words: list[str]
    sweep: str | None
    nproc: int | None
    plugin: str | None
    steps: int | None
    repeats: int | None
    settings: dict[str, Any]


@dataclass(frozen=True)
class SpeedFigures:
    """Images/s: of the repeats that ended well, by their numbers."""

    mean: float
    std: float | None
    runs: dict[int, float]


@dataclass(frozen=True)
class RatioFigures:
    """How many times as fast as the reference, repeat by repeat."""

    median: float
    low: float
    high: float
    runs: list[float]


@dataclass(frozen=True)
class ComparedFigures:
    """What is shown of a row and its reference, and the confidence interval of their ratio."""

    verdict: str
    low: float | None
    high: float | None


@dataclass(frozen=True)
class EntryFigures:
    """A row of the table. Of the timed repeats: means, and of memory the most; losses and accuracy of the last one."""

    entry: str
    mode: str
    words: list[str]
    value: Any
    ranks: int
    threads: int
    devices: list[str] | None
    repeats: int
    step_time_s: float | None
    peak_memory_bytes: dict[str, int]
    train_loss: float | None
    val_loss: float | None
    val_top1: float | None
    data_wait_fraction: float | None
    samples_per_sec: SpeedFigures | None
    ratio: RatioFigures | None
    reference: str
    compared: ComparedFigures | None
    exactness: Exactness
    label: str
    error: str | None
    exit_code: int
    predicted_samples_per_sec: float | None

    @property
    def disagrees(self) -> bool:
        return self.exactness.verdict == "disagrees"


@dataclass(frozen=True)
class MachineFigures:
    cpu: str
    cores: int
    memory_bytes: int
    gpus: list[str]
    system: str

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / 2**30:.0f} GiB" if self.memory_bytes else ""
        return ", ".join(filter(None, [self.cpu, f"{self.cores} cores", memory, *self.gpus, self.system]))


@dataclass(frozen=True)
class ComparisonReport:
    """All of it."""

    recipe: str
    status: str
    command: str
    asked: ComparisonRequest
    length: Length | None
    repeats: int
    steps: int | None
    warmup_steps: int
    batch_size: int
    model: str
    sweep: Sweep | None
    entries: list[EntryFigures]
    pairs: list[Difference]
    conclusion: list[str]
    other_programs_cores: float | None
    machine: MachineFigures
    versions: dict[str, str | None]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As compare.json has it."""
        return asdict(self)


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
        return [f"other programs kept {cores:.1f} of {os.cpu_count()} cores busy meanwhile: compare again without them"]


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

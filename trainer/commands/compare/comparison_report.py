"""The keys of a comparison: what `compare` returns and compare.json holds. They are stable."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainer.commands.compare.exactness import Exactness
from trainer.commands.compare.running import Length
from trainer.commands.compare.significance import Difference


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
class SweepFigures:
    key: str
    values: list[Any]


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
    sweep: SweepFigures | None
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

"""The keys of a comparison: what `compare` returns and compare.json holds. They are stable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer.commands.compare.entries import Entry
from trainer.commands.compare.exactness import Exactness
from trainer.commands.trials.report import MachineFigures
from trainer.commands.trials.significance import Difference


@dataclass
class EntryRuns:
    """An entry and what its runs left."""

    entry: Entry
    parts: list[str]  # what in its model depends on how a batch is divided
    # (line, exit code): why it cannot run here, or of the run that failed, after which the entry was left alone
    error: tuple[str, int] | None = None
    # result.json of each finished repeat; repeat 0 is the check of the losses, which is not timed
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    speeds: dict[int, float] = field(default_factory=dict)  # images/s of each timed repeat
    losses: list[float] = field(default_factory=list)  # of the check, one a step
    # as losses, of the same mathematics with its sums in another order; empty where that was not run
    rounded: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Length:
    """How long a timed run is: optimizer steps in all, epochs that hold them, steps from one logged row to the next."""

    steps: int
    epochs: int
    every: int

    def words(self) -> list[str]:
        """All entries train as long."""
        steps = [f"max_steps={self.steps}", f"epochs={self.epochs}", f"logging.every_steps={self.every}"]
        return [*steps, "stop.patience=null"]


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

    @property
    def disagrees(self) -> bool:
        return self.exactness.verdict == "disagrees"


@dataclass(frozen=True)
class ComparisonReport:
    """All of it."""

    recipe: str
    status: str
    command: str
    asked: dict[str, Any]  # what `compare` was asked for; `settings` are those of its recipe, resolved
    length: Length | None
    repeats: int
    steps: int | None
    warmup_steps: int
    batch_size: int
    model: str
    entries: list[EntryFigures]
    pairs: list[Difference]
    conclusion: list[str]
    other_programs_cores: float | None
    machine: MachineFigures
    versions: dict[str, str | None]
    seconds: float

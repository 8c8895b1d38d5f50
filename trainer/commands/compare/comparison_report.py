"""The keys of a comparison: what `compare` returns and compare.json holds. They are stable."""

from __future__ import annotations

from typing import Any, TypedDict


class Asked(TypedDict):
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


class SweepFigures(TypedDict):
    key: str
    values: list[Any]


class SpeedFigures(TypedDict):
    """Images/s: of the repeats that ended well, by their numbers."""

    mean: float
    std: float | None
    runs: dict[int, float]


class RatioFigures(TypedDict):
    """How many times as fast as the reference, repeat by repeat."""

    median: float
    low: float
    high: float
    runs: list[float]


class ComparedFigures(TypedDict):
    """What is shown of a row and its reference, and the confidence interval of their ratio."""

    verdict: str
    low: float | None
    high: float | None


class RunFigures(TypedDict):
    """Of the timed repeats: means, and of memory the most; of the learning what the last one came to."""

    devices: list[str] | None
    repeats: int
    step_time_s: float | None
    peak_memory_bytes: dict[str, int]
    train_loss: float | None
    val_loss: float | None
    val_top1: float | None
    data_wait_fraction: float | None


class EntryFigures(RunFigures):
    """A row of the table."""

    entry: str
    mode: str
    words: list[str]
    value: Any
    ranks: int
    threads: int
    samples_per_sec: SpeedFigures | None
    ratio: RatioFigures | None
    reference: str
    compared: ComparedFigures | None
    exactness: dict[str, Any]  # the fields of `exactness.Exactness`
    label: str
    error: str | None
    exit_code: int
    predicted_samples_per_sec: float | None


class MachineFigures(TypedDict):
    cpu: str
    cores: int
    memory_bytes: int
    gpus: list[str]
    system: str


class ComparisonReport(TypedDict):
    """All of it."""

    recipe: str
    status: str
    command: str
    asked: Asked
    length: dict[str, int] | None  # those of `running.Length`
    repeats: int
    steps: int | None
    warmup_steps: int
    batch_size: int
    model: str
    sweep: SweepFigures | None
    entries: list[EntryFigures]
    pairs: list[dict[str, Any]]  # those of `significance.Difference`
    conclusion: list[str]
    other_programs_cores: float | None
    machine: MachineFigures
    versions: dict[str, str | None]
    seconds: float

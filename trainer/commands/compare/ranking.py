"""What the runs amount to, with the keys that `compare` returns and compare.json holds, which are stable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from trainer.commands.compare.entries import Entry
from trainer.commands.compare.exactness import Exactness, exactness_of
from trainer.commands.trials import significance
from trainer.commands.trials.report import MachineFigures, listed
from trainer.commands.trials.significance import Difference

PASS_THROUGH = "pass-through: torch's DataParallel does nothing without CUDA"
STAND_IN = "on CPU cores"
NO_DIFFERENCE = "no difference shown"


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


def tabulate(
    rows: Sequence[EntryRuns], error: float = significance.ERROR
) -> tuple[list[EntryFigures], list[Difference]]:
    """The rows of the table, and the pairs that were compared; `error`: probability that any pair is said to differ
    that does not.
    """
    fair = {row.entry.name: row.speeds for row in rows if row.speeds and not _passes_through(row)}
    pairs = significance.differences(fair, error)
    against = {(pair.first, pair.second): pair for pair in pairs}
    against |= {(pair.second, pair.first): _turned(pair) for pair in pairs}
    return [_figures(row, rows, against, row.entry.name in fair) for row in rows], pairs


def _figures(
    row: EntryRuns, rows: Sequence[EntryRuns], against: Mapping[tuple[str, str], Difference], is_fair: bool
) -> EntryFigures:
    entry, reference = row.entry, _reference_of(rows)
    pair = against.get((entry.name, reference.entry.name))
    timed = [result for repeat, result in row.results.items() if repeat > 0]
    last: Mapping[str, Any] = timed[-1] if timed else {}
    times = [row.results[repeat]["batch_size"] / speed for repeat, speed in row.speeds.items()]
    peaks: dict[str, int] = {}
    for device, size in (pair for result in timed for pair in result["peak_memory_bytes"].items()):
        peaks[device] = max(size, peaks.get(device, 0))
    single = reference if reference.entry.recipe.traits.reference else None
    return EntryFigures(
        entry=entry.name,
        mode=entry.recipe.mode,
        words=list(entry.words),
        ranks=entry.ranks,
        threads=entry.threads,
        devices=last.get("devices"),
        repeats=len(timed),
        step_time_s=significance.mean_and_std(times)[0] if times else None,
        peak_memory_bytes=dict(sorted(peaks.items())),
        train_loss=last.get("train_loss"),
        val_loss=last.get("val_loss"),
        val_top1=last.get("val_top1"),
        data_wait_fraction=last.get("data_wait_fraction"),
        samples_per_sec=_spread(row.speeds),
        ratio=_ratio(row.speeds, reference.speeds) if is_fair and reference is not row else None,
        reference=reference.entry.name,
        compared=ComparedFigures(pair.verdict or NO_DIFFERENCE, pair.low, pair.high) if pair else None,
        exactness=exactness_of(
            entry,
            row.losses,
            single.entry if single else None,
            single.losses if single else [],
            row.parts,
            single.rounded if single else [],
        ),
        label=_label(row),
        error=row.error[0] if row.error else None,
        exit_code=row.error[1] if row.error else 0,
    )


def _reference_of(rows: Sequence[EntryRuns]) -> EntryRuns:
    """What a ratio is to: single, else the first entry."""
    return next((row for row in rows if row.entry.recipe.traits.reference), rows[0])


def conclusion(table: Sequence[EntryFigures], pairs: Sequence[Difference]) -> list[str]:
    """What may be said, in sentences: who is shown to be the fastest, or between whom no difference is shown."""
    sentences = [
        f"{row.entry} DISAGREES with {row.reference}: it computes something else, and its speed means nothing"
        for row in table
        if row.disagrees
    ]
    compared = sound(table, pairs)
    if not compared:
        return [*sentences, "nothing to compare: fewer than two rows with a speed"]
    if all(pair.low is None for pair in compared):
        return [*sentences, f"{NO_DIFFERENCE}: that takes repeats=2 or more, better 5"]
    names = list(dict.fromkeys(name for pair in compared for name in (pair.first, pair.second)))
    best = significance.fastest(names, compared)
    if len(best) == len(names):
        few = min(pair.pairs for pair in compared)
        hint = f"; {few} repeats show only very large ones, try repeats=5" if few < 4 else ""
        return [*sentences, f"{NO_DIFFERENCE} between {listed(best)}{hint}"]
    several = f", {NO_DIFFERENCE} between them" if len(best) > 1 else ""
    return [*sentences, f"fastest: {listed(best)}{several}"]


def explained(table: Sequence[EntryFigures]) -> list[str]:
    """What a label of the table means, where it says too little by itself."""
    marked = any(row.label == STAND_IN for row in table)
    return [f"rows marked '{STAND_IN}' used these in place of GPUs, on which the order may differ"] * marked


def sound(table: Sequence[EntryFigures], pairs: Sequence[Difference]) -> list[Difference]:
    """The pairs of rows that did not fail and compute what they should."""
    good = {row.entry for row in table if not row.error and not row.disagrees}
    return [pair for pair in pairs if {pair.first, pair.second} <= good]


def _spread(speeds: Mapping[int, float]) -> SpeedFigures | None:
    if not speeds:
        return None
    mean, std = significance.mean_and_std(list(speeds.values()))
    return SpeedFigures(mean, std if len(speeds) > 1 else None, dict(speeds))


def _ratio(speeds: Mapping[int, float], reference: Mapping[int, float]) -> RatioFigures | None:
    paired = significance.ratios(speeds, reference)
    if not paired:
        return None
    return RatioFigures(median(paired), min(paired), max(paired), paired)


def _passes_through(row: EntryRuns) -> bool:
    return any((result.get("data_parallel") or {}).get("pass_through") for result in row.results.values())


def _label(row: EntryRuns) -> str:
    if _passes_through(row):
        return PASS_THROUGH
    devices: list[str] = next((result["devices"] for result in row.results.values()), [])
    return STAND_IN if len(devices) > 1 and all(name.startswith("cpu") for name in devices) else ""


def _turned(pair: Difference) -> Difference:
    """The same difference, seen from the other side."""
    low, high = (1 / pair.high, 1 / pair.low) if pair.low and pair.high else (None, None)
    other = {"faster": "slower", "slower": "faster"}.get(pair.verdict or "")
    return Difference(pair.second, pair.first, pair.pairs, 1 / pair.ratio, low, high, pair.p, other)

"""What the runs amount to, with the keys that `compare` returns and compare.json holds, which are stable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

from trainer.commands.compare.entries import Entry
from trainer.commands.compare.exactness import UNCHECKED, Exactness, batch_dependent, exactness_of
from trainer.commands.trials import significance
from trainer.commands.trials.significance import Difference

PASS_THROUGH = "pass-through: torch's DataParallel does nothing without CUDA"
STAND_IN = "on CPU cores"
NO_DIFFERENCE = "no difference shown"


@dataclass
class EntryRuns:
    """An entry and what its runs left."""

    entry: Entry
    # (line, exit code): why it cannot run here, or of the run that failed, after which the entry was left alone
    error: tuple[str, int] | None = None
    # result.json of each finished repeat; repeat 0 is the check of the losses, which is not timed
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    speeds: dict[int, float] = field(default_factory=dict)  # images/s of each timed repeat
    losses: list[float] = field(default_factory=list)  # of the check, one a step
    # as losses, of the same mathematics with its sums in another order; empty where that was not run
    rounded: list[float] = field(default_factory=list)

    @cached_property
    def parts(self) -> list[str]:
        """What in its model depends on how a batch is divided."""
        return batch_dependent(self.entry.recipe)


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
class EntryFigures:
    """A row of the table. Of the timed repeats: means, and of memory the most; losses and accuracy of the last one."""

    entry: str
    mode: str
    words: list[str]
    ranks: int
    threads: int
    devices: list[str] | None
    shares: list[int] | None  # images of a step of each rank, where these are unequal
    repeats: int
    step_time_s: float | None
    peak_memory_bytes: dict[str, int]
    train_loss: float | None
    val_loss: float | None
    val_top1: float | None
    data_wait_fraction: float | None
    samples_per_sec: dict[str, Any] | None  # mean, std, runs: images/s of the repeats that ended well, by their numbers
    ratio: dict[str, Any] | None  # median, low, high, runs: how many times as fast as the reference, repeat by repeat
    reference: str
    compared: dict[str, Any] | None  # verdict; low, high: confidence interval of the ratio to the reference
    exactness: Exactness
    label: str
    error: str | None
    exit_code: int


def tabulate(rows: Sequence[EntryRuns], error: float) -> tuple[list[EntryFigures], list[Difference]]:
    """The rows of the table, and the compared pairs; `error`: probability that any is wrongly said to differ."""
    reference = next((row for row in rows if row.entry.recipe.traits.reference), rows[0])  # what a ratio is to
    last = sorted(rows, key=lambda row: row is reference)  # so that all pairs are relative to it
    fair = {row.entry.name: row.speeds for row in last if row.speeds and not _passes_through(row)}
    pairs = significance.differences(fair, error)
    against = {pair.first: pair for pair in pairs if pair.second == reference.entry.name}
    return [_figures(row, reference, against.get(row.entry.name), row.entry.name in fair) for row in rows], pairs


def _figures(row: EntryRuns, reference: EntryRuns, pair: Difference | None, is_fair: bool) -> EntryFigures:
    entry, speeds = row.entry, list(row.speeds.values())
    timed = [result for repeat, result in row.results.items() if repeat > 0]
    last: Mapping[str, Any] = timed[-1] if timed else {}
    times = [row.results[repeat]["batch_size"] / speed for repeat, speed in row.speeds.items()]
    peaks: dict[str, int] = {}
    for device, size in (pair for result in timed for pair in result["peak_memory_bytes"].items()):
        peaks[device] = max(size, peaks.get(device, 0))
    single = reference if reference.entry.recipe.traits.reference else None
    expected = (single.entry, single.losses, single.parts, single.rounded) if single else (None, [], [], [])
    mean, std = significance.mean_and_std(speeds) if speeds else (None, None)
    paired = significance.ratios(row.speeds, reference.speeds) if is_fair and reference is not row else []
    return EntryFigures(
        entry=entry.name,
        mode=entry.recipe.mode,
        words=list(entry.words),
        ranks=entry.ranks,
        threads=entry.threads,
        devices=last.get("devices"),
        shares=next((found for result in [*row.results.values()][::-1] if (found := result.get("shares"))), None),
        repeats=len(timed),
        step_time_s=significance.mean_and_std(times)[0] if times else None,
        peak_memory_bytes=dict(sorted(peaks.items())),
        train_loss=last.get("train_loss"),
        val_loss=last.get("val_loss"),
        val_top1=last.get("val_top1"),
        data_wait_fraction=last.get("data_wait_fraction"),
        samples_per_sec={"mean": mean, "std": std if speeds[1:] else None, "runs": dict(row.speeds)}
        if speeds
        else None,
        ratio={"median": median(paired), "low": min(paired), "high": max(paired), "runs": paired} if paired else None,
        reference=reference.entry.name,
        compared={"verdict": pair.verdict or NO_DIFFERENCE, "low": pair.low, "high": pair.high} if pair else None,
        exactness=exactness_of(entry, row.losses, *expected),
        label=_label(row),
        error=row.error[0] if row.error else None,
        exit_code=row.error[1] if row.error else 0,
    )


def conclusion(table: Sequence[EntryFigures], pairs: Sequence[Difference]) -> list[str]:
    """What may be said, in sentences: who is shown to be the fastest, or between whom no difference is shown."""
    sentences = [
        f"{row.entry} DISAGREES with {row.reference}: it computes something else, and its speed means nothing"
        for row in table
        if row.exactness.verdict == "disagrees"
    ]
    if any(row.exactness.text == UNCHECKED for row in table):
        sentences.append(
            "nothing was held against mode=single, which did not run: list it, and give words that it refuses to the "
            "other entries, as in 'modes=[single,\"ddp shares=auto\"]'"
        )
    compared = sound(table, pairs)
    names = [row.entry for row in table if any(row.entry in (pair.first, pair.second) for pair in compared)]
    best = significance.fastest(names, compared)
    if not compared:
        sentences.append("nothing to compare: fewer than two rows with a speed")
    elif all(pair.low is None for pair in compared):
        sentences.append(f"{NO_DIFFERENCE}: that takes repeats=2 or more, better 5")
    elif len(best) == len(names):
        few = min(pair.pairs for pair in compared)
        hint = f"; {few} repeats show only very large ones, try repeats=5" if few < 4 else ""
        sentences.append(f"{NO_DIFFERENCE} between {' and '.join(best)}{hint}")
    else:
        sentences.append(f"fastest: {' and '.join(best)}" + f", {NO_DIFFERENCE} between them" * (len(best) > 1))
    if any(row.label == STAND_IN for row in table):
        sentences.append(f"rows marked '{STAND_IN}' used these in place of GPUs, on which the order may differ")
    return sentences


def sound(table: Sequence[EntryFigures], pairs: Sequence[Difference]) -> list[Difference]:
    """The pairs of rows that did not fail and compute what they should."""
    good = {row.entry for row in table if not row.error and row.exactness.verdict != "disagrees"}
    return [pair for pair in pairs if {pair.first, pair.second} <= good]


def _passes_through(row: EntryRuns) -> bool:
    return any((result.get("data_parallel") or {}).get("pass_through") for result in row.results.values())


def _label(row: EntryRuns) -> str:
    if _passes_through(row):
        return PASS_THROUGH
    devices: list[str] = next((result["devices"] for result in row.results.values()), [])
    return STAND_IN if len(devices) > 1 and all(name.startswith("cpu") for name in devices) else ""

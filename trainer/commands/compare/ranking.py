"""What the runs amount to, with the keys that `compare` returns and compare.json holds, which are stable; and whether a
mode computes what `single` computes, by their first losses, step by step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from trainer.commands.compare.entries import Entry
from trainer.commands.trials import significance
from trainer.commands.trials.significance import Difference
from trainer.recipe import changed_keys

PASS_THROUGH = "pass-through: torch's DataParallel does nothing without CUDA"
STAND_IN = "on CPU cores"
NO_DIFFERENCE = "no difference shown"
# Relative, of a step's loss. Half precision rounds, and a run's rounding grows with every step.
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-4, "fp16": 1e-3, "bf16": 1e-2}  # what is trained in tf32 is checked in fp32
# Other kernels add in another order, and a large learning rate makes much of it: on GPUs so many times what rounding
# alone makes of single's losses is allowed too, but never more than this.
TIMES, MOST = 4.0, 1e-2
# Where layers see other parts of a batch losses may differ much (batch norm over 4 digits: by 74 % within 20 steps),
# and nothing is proved by it; but a mode that learns has not twice the loss.
LOOSE = 2.0
# Keys that change no result, beside those that a continued run may change.
SAME_MATHS = {"channels_last", "compile", "sync_bn", "deterministic"}
UNCHECKED = "no single to compare"


@dataclass(frozen=True)
class Exactness:
    """What was found."""

    # "reference", "exact", "differs" (as it may, for the reason in text), "disagrees", "other maths", "not compared"
    verdict: str
    text: str  # the table's words
    deviation: float | None = None  # the largest relative difference of a loss, where losses were compared


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


def tabulate(rows: Sequence[Entry], error: float) -> tuple[list[EntryFigures], list[Difference]]:
    """The rows of the table, and the compared pairs; `error`: probability that any is wrongly said to differ."""
    reference = next((row for row in rows if row.recipe.traits.reference), rows[0])  # what a ratio is to
    last = sorted(rows, key=lambda row: row is reference)  # so that all pairs are relative to it
    fair = {row.name: row.speeds for row in last if row.speeds and not _passes_through(row)}
    pairs = significance.differences(fair, error)
    against = {pair.first: pair for pair in pairs if pair.second == reference.name}
    return [_figures(row, reference, against.get(row.name), row.name in fair) for row in rows], pairs


def _figures(row: Entry, reference: Entry, pair: Difference | None, is_fair: bool) -> EntryFigures:
    speeds = list(row.speeds.values())
    timed = [result for repeat, result in row.results.items() if repeat > 0]
    last: Mapping[str, Any] = timed[-1] if timed else {}
    times = [row.results[repeat]["batch_size"] / speed for repeat, speed in row.speeds.items()]
    peaks = sorted(pair for result in timed for pair in result["peak_memory_bytes"].items())
    paired = significance.ratios(row.speeds, reference.speeds) if is_fair and reference is not row else []
    spread = stdev(speeds) if speeds[1:] else None
    return EntryFigures(
        entry=row.name,
        mode=row.recipe.mode,
        words=list(row.words),
        ranks=row.ranks,
        threads=row.threads,
        shares=next((found for result in [*row.results.values()][::-1] if (found := result.get("shares"))), None),
        repeats=len(timed),
        step_time_s=fmean(times) if times else None,
        peak_memory_bytes=dict(peaks),  # of a device's the last, which is the largest
        **{key: last.get(key) for key in ("devices", "train_loss", "val_loss", "val_top1", "data_wait_fraction")},
        samples_per_sec={"mean": fmean(speeds), "std": spread, "runs": dict(row.speeds)} if speeds else None,
        ratio={"median": median(paired), "low": min(paired), "high": max(paired), "runs": paired} if paired else None,
        reference=reference.name,
        compared={"verdict": pair.verdict or NO_DIFFERENCE, "low": pair.low, "high": pair.high} if pair else None,
        exactness=exactness_of(row, reference if reference.recipe.traits.reference else None),
        label=_label(row),
        error=str(row.problem) if row.problem else None,
        exit_code=row.problem.code if row.problem else 0,
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


def _passes_through(row: Entry) -> bool:
    return any((result.get("data_parallel") or {}).get("pass_through") for result in row.results.values())


def _label(row: Entry) -> str:
    if _passes_through(row):
        return PASS_THROUGH
    devices: list[str] = next((result["devices"] for result in row.results.values()), [])
    return STAND_IN if len(devices) > 1 and all(name.startswith("cpu") for name in devices) else ""


def exactness_of(entry: Entry, reference: Entry | None) -> Exactness:
    """Hold an entry's losses against those of the reference, which is `single`."""
    if entry is reference:
        return Exactness("reference", "reference")
    if not entry.recipe.traits.same_maths:
        return Exactness("other maths", "not same maths")
    if not entry.losses:
        return Exactness("not compared", "-")
    if reference is None or not reference.losses:
        return Exactness("not compared", UNCHECKED)
    if changed := changed_keys(reference.recipe, entry.recipe).keys() - SAME_MATHS:
        return Exactness("not compared", f"other {', '.join(sorted(changed))}")
    deviation = _deviation(entry.losses, reference.losses)
    scatter = _deviation(reference.rounded, reference.losses)
    if deviation <= max(TOLERANCE[entry.recipe.precision], min(TIMES * scatter, MOST)):
        return Exactness("exact", "exact", deviation)
    mine, theirs = map(math.fsum, zip(*zip(entry.losses, reference.losses, strict=False), strict=True))
    if reference.parts and mine <= LOOSE * theirs:
        return Exactness("differs", f"{reference.parts[0]}: {deviation:.1%}", deviation)
    return Exactness("disagrees", f"DISAGREES by {deviation:.1%}", deviation)


def _deviation(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference."""
    pairs = zip(losses, expected, strict=False)
    deviations = (abs(a - b) / max(abs(b), 1e-12) if math.isfinite(a) else math.inf for a, b in pairs)
    return max(deviations, default=0.0)

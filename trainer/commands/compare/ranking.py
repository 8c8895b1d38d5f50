"""What the runs amount to: one row an entry, and what can be said of which is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from trainer.commands.compare import significance
from trainer.commands.compare.comparison_report import ComparedFigures, EntryFigures, RatioFigures, SpeedFigures
from trainer.commands.compare.entries import Entry
from trainer.commands.compare.exactness import Exactness, exactness_of
from trainer.commands.compare.running import Repeats
from trainer.commands.compare.significance import Difference

PASS_THROUGH = "pass-through: torch's DataParallel does nothing without CUDA"
STAND_IN = "on CPU cores"
NO_DIFFERENCE = "no difference shown"


def reference_of(entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    """What an entry's ratio is to: single at the same swept value, else single, else the first entry of all."""
    singles = [other for other in entries if other.traits.reference]
    same = [other for other in singles if other.value == entry.value]
    return next(iter(same or singles or entries), None)


def tabulate(
    entries: Sequence[Entry],
    runs: Sequence[Repeats],
    parts: Mapping[str, Sequence[str]],
    predicted: Mapping[str, float],
    error: float = significance.ERROR,
) -> tuple[list[EntryFigures], list[Difference]]:
    """The rows of the table, and the pairs that were compared.

    Args:
        parts: what in each entry's model depends on how a batch is divided.
        predicted: images/s by entry, where a plan was made.
        error: probability that any pair is said to differ that does not.
    """
    by_name = {entry.name: (entry, row) for entry, row in zip(entries, runs, strict=True)}
    speeds = {name: row.speeds for name, (_, row) in by_name.items()}
    fair = {name: speed for name, speed in speeds.items() if speed and not _passes_through(by_name[name][1])}
    pairs = significance.differences(fair, error)
    against = {(pair.first, pair.second): pair for pair in pairs}
    table: list[EntryFigures] = []
    for name, (entry, row) in by_name.items():
        reference = reference_of(entry, entries)
        other = reference.name if reference else ""
        pair = against.get((name, other)) or _turned(against.get((other, name)))
        timed = [result for repeat, result in row.results.items() if repeat > 0]
        last: Mapping[str, Any] = timed[-1] if timed else {}
        times = [row.results[repeat]["batch_size"] / speed for repeat, speed in row.speeds.items()]
        peaks: dict[str, int] = {}
        for device, size in (pair for result in timed for pair in result["peak_memory_bytes"].items()):
            peaks[device] = max(size, peaks.get(device, 0))
        table.append(
            EntryFigures(
                entry=name,
                mode=entry.mode,
                words=list(entry.words),
                value=entry.value,
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
                samples_per_sec=_spread(speeds[name]),
                ratio=_ratio(speeds[name], speeds.get(other, {})) if name in fair and other != name else None,
                reference=other,
                compared=ComparedFigures(pair.verdict or NO_DIFFERENCE, pair.low, pair.high) if pair else None,
                exactness=_exactness(entry, row, reference, by_name, parts[name]),
                label=_label(entry, row),
                error=row.error[0] if row.error else None,
                exit_code=row.error[1] if row.error else 0,
                predicted_samples_per_sec=predicted.get(name),
            )
        )
    return table, pairs


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
        return [*sentences, f"{NO_DIFFERENCE} between {_listed(best)}{hint}"]
    several = f", {NO_DIFFERENCE} between them" if len(best) > 1 else ""
    return [*sentences, f"fastest: {_listed(best)}{several}"]


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


def _passes_through(row: Repeats) -> bool:
    return any((result.get("data_parallel") or {}).get("pass_through") for result in row.results.values())


def _label(entry: Entry, row: Repeats) -> str:
    if _passes_through(row):
        return PASS_THROUGH
    devices: list[str] = next((result["devices"] for result in row.results.values()), [])
    return STAND_IN if len(devices) > 1 and all(name.startswith("cpu") for name in devices) else ""


def _exactness(
    entry: Entry,
    row: Repeats,
    reference: Entry | None,
    by_name: Mapping[str, tuple[Entry, Repeats]],
    parts: Sequence[str],
) -> Exactness:
    single = reference if reference and reference.traits.reference else None
    expected = by_name[single.name][1] if single else Repeats()
    return exactness_of(entry, row.losses, single, expected.losses, parts, expected.rounded)


def _turned(pair: Difference | None) -> Difference | None:
    """The same difference, seen from the other side."""
    if pair is None:
        return None
    low, high = (1 / pair.high, 1 / pair.low) if pair.low and pair.high else (None, None)
    other = {"faster": "slower", "slower": "faster"}.get(pair.verdict or "")
    return Difference(pair.second, pair.first, pair.pairs, 1 / pair.ratio, low, high, pair.p, other)


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]

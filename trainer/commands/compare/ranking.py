"""Rows and conclusions of a comparison, and the check that all modes compute the same losses.

The check compares the first losses of a mode with those of `single`, step by step. The fields of
`EntryFigures` are keys of compare.json, which scripts read, so they never change.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from trainer.commands.compare.entries import CHECK, Entry
from trainer.commands.trials.significance import (
    Difference,
    compute_deviation,
    compute_ratios,
    find_differences,
    find_fastest,
    summarize,
)
from trainer.recipe import changed_keys
from trainer.saving.files import Json

PASS_THROUGH = "pass-through: torch's DataParallel does nothing without CUDA"
STAND_IN = "on CPU cores"
DISTURBED = "busy machine"
NO_DIFFERENCE = "no difference shown"
# Allowed relative deviation of a step's loss. fp16 and bf16 round more coarsely than fp32, and the
# rounding errors of a run grow with every step. Runs with tf32 are checked in fp32, hence the same
# value.
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-4, "fp16": 1e-3, "bf16": 1e-2}
# Different kernels add in a different order, and a large learning rate amplifies the difference.
# On GPUs, the allowed deviation grows to this multiple of the deviation that rounding alone causes
# in the losses of `single`.
ROUNDING_FACTOR = 4.0
# Maximum of the allowed deviation that results from `ROUNDING_FACTOR`.
MAX_TOLERANCE = 1e-2
# If the output of a layer depends on how a batch is divided, losses may differ a lot without an
# error: batch norm over 4 images of the digits data set changes them by 74 % within 20 steps.
# Summed losses that exceed those of `single` by more than this factor count as an error.
MAX_LOSS_RATIO = 2.0
# Recipe keys that do not change the maths: if an entry differs from `single` only in these, its
# losses must agree with those of `single` up to rounding. Keys that may change when a run is
# resumed are not listed, because `changed_keys` leaves them out.
SAME_MATHS = {"channels_last", "compile", "sync_bn", "deterministic"}
UNCHECKED = "no single to compare"


@dataclass(frozen=True)
class Exactness:
    """Result of the comparison of an entry's losses with those of `single`.

    Attributes:
        verdict: "reference", "exact", "differs" (allowed, for the reason in `text`), "disagrees",
            "other maths" or "not compared".
        text: text of the table's cell.
        deviation: largest relative difference of a loss; None if no losses were compared.
    """

    verdict: str
    text: str
    deviation: float | None = None


@dataclass(frozen=True)
class Length:
    """Length of a timed run.

    Attributes:
        steps: number of optimizer steps, warm-up included.
        epochs: number of epochs, enough for `steps`.
        every: number of steps from one logged row to the next.
    """

    steps: int
    epochs: int
    every: int

    def words(self) -> list[str]:
        """Return the arguments that make every entry train for this length."""
        return [
            f"max_steps={self.steps}",
            f"epochs={self.epochs}",
            f"logging.every_steps={self.every}",
            "stop.patience=null",
        ]


@dataclass(frozen=True)
class EntryFigures:
    """Row of the table: the results of one entry.

    Speed and step time are means over the undisturbed timed repeats, or over all timed repeats if
    none was undisturbed. Peak memory is the maximum over the timed repeats. Devices, losses,
    accuracy and the fraction of time spent waiting for data are those of the last timed repeat.

    Attributes:
        entry: name of the entry.
        words: arguments of the command line that all runs of the entry share.
        shares: images of each rank in one step; None if all ranks have the same number.
        repeats: number of finished timed repeats.
        samples_per_sec: images/s with the keys "mean", "std", and "runs" (by number of the
            repeat); None if no repeat has a speed.
        ratio: speed relative to the reference in the repeats that both have, with the keys
            "median", "low", "high" and "runs"; None without such a repeat.
        reference: name of the entry with which the others are compared.
        compared: "verdict" on the difference from the reference, and the confidence interval of
            the ratio from "low" to "high"; None if the two were not compared.
        exactness: result of the comparison of the entry's losses with those of `single`.
        label: phrase that limits what the speed means, such as `STAND_IN`; empty if nothing does.
        error: why the entry cannot run here, or the error of the run that failed; None if the
            entry has neither.
        exit_code: exit code of `error`; 0 without an error.
        disturbed: number of timed repeats during which other processes used the machine.
    """

    entry: str
    mode: str
    words: list[str]
    ranks: int
    threads: int
    devices: list[str] | None
    shares: list[int] | None
    repeats: int
    step_time_s: float | None
    peak_memory_bytes: dict[str, int]
    train_loss: float | None
    val_loss: float | None
    val_top1: float | None
    data_wait_fraction: float | None
    samples_per_sec: Json | None
    ratio: Json | None
    reference: str
    compared: Json | None
    exactness: Exactness
    label: str
    error: str | None
    exit_code: int
    disturbed: int


def tabulate(rows: Sequence[Entry], error: float) -> tuple[list[EntryFigures], list[Difference]]:
    """Compute the rows of the table and the differences between all pairs of entries.

    Args:
        rows: the entries with the results of their runs.
        error: maximum probability that any pair is wrongly said to differ.

    Returns:
        (table, pairs): one row per entry, and one difference per pair of entries that have an
        undisturbed repeat in common.
    """
    reference = next((row for row in rows if row.recipe.traits.reference), rows[0])
    # A pair has the speed of its first entry relative to its second one. The reference comes last,
    # so that it is the second entry of all its pairs.
    reference_last = sorted(rows, key=lambda row: row is reference)
    fair = {
        row.name: row.fair_speeds
        for row in reference_last
        if row.fair_speeds and not _passes_through(row)
    }
    pairs = find_differences(fair, error)
    to_reference = {pair.first: pair for pair in pairs if pair.second == reference.name}
    table = [
        _compute_figures(row, reference, to_reference.get(row.name), row.name in fair)
        for row in rows
    ]
    return table, pairs


def _compute_figures(
    row: Entry, reference: Entry, pair: Difference | None, is_fair: bool
) -> EntryFigures:
    runs = row.fair_speeds or row.speeds
    speeds = list(runs.values())
    samples_per_sec = None
    step_time = None
    if speeds:
        spread = stdev(speeds) if len(speeds) > 1 else None
        samples_per_sec = {"mean": fmean(speeds), "std": spread, "runs": runs}
        times = [row.results[repeat]["batch_size"] / speed for repeat, speed in runs.items()]
        step_time = fmean(times)
    ratio = None
    if is_fair and reference is not row:
        ratios = compute_ratios(row.fair_speeds, reference.fair_speeds)
        if ratios:
            ratio = {**summarize(ratios), "runs": ratios}
    compared = None
    if pair:
        verdict = pair.verdict or NO_DIFFERENCE
        compared = {"verdict": verdict, "low": pair.low, "high": pair.high}
    repeats = 0
    last = {}
    peaks: dict[str, int] = {}
    shares = None
    for repeat, result in row.results.items():
        shares = result.get("shares") or shares
        if repeat > CHECK:
            repeats += 1
            last = result
            for device, peak in result["peak_memory_bytes"].items():
                peaks[device] = max(peak, peaks.get(device, peak))
    error = None
    exit_code = 0
    if row.problem:
        error = str(row.problem)
        exit_code = row.problem.code
    # If `single` was not run, the reference of speeds is another mode, with which no losses are
    # compared.
    exactness = compare_losses(row, reference if reference.recipe.traits.reference else None)
    return EntryFigures(
        entry=row.name,
        mode=row.recipe.mode,
        words=list(row.words),
        ranks=row.ranks,
        threads=row.threads,
        devices=last.get("devices"),
        shares=shares,
        repeats=repeats,
        step_time_s=step_time,
        peak_memory_bytes=dict(sorted(peaks.items())),
        train_loss=last.get("train_loss"),
        val_loss=last.get("val_loss"),
        val_top1=last.get("val_top1"),
        data_wait_fraction=last.get("data_wait_fraction"),
        samples_per_sec=samples_per_sec,
        ratio=ratio,
        reference=reference.name,
        compared=compared,
        exactness=exactness,
        label=_format_label(row),
        error=error,
        exit_code=exit_code,
        disturbed=len(row.disturbed),
    )


def draw_conclusion(table: Sequence[EntryFigures], pairs: Sequence[Difference]) -> list[str]:
    """Return sentences that name the fastest entry, and what limits this statement."""
    sentences = []
    unmeasured = []
    disturbed = 0
    timed = 0
    for row in table:
        disturbed += row.disturbed
        timed += row.repeats
        if not row.error and not row.samples_per_sec:
            unmeasured.append(row.entry)
        if row.exactness.verdict == "disagrees":
            sentences.append(
                f"{row.entry} DISAGREES with {row.reference}: it computes something else, so its "
                "speed means nothing"
            )
    if any(row.exactness.text == UNCHECKED for row in table):
        sentences.append(
            "no losses were compared, because mode=single did not run: list it, and move arguments "
            "that it refuses to the other entries, as in 'modes=[single,\"ddp shares=auto\"]'"
        )
    compared = select_sound(table, pairs)
    compared_names = {name for pair in compared for name in (pair.first, pair.second)}
    names = [row.entry for row in table if row.entry in compared_names]
    fastest = find_fastest(names, compared)
    if disturbed:
        sentences.append(
            f"other processes used the machine during {disturbed} of {timed} timed runs, which are "
            "not compared: stop them (top shows which), and measure these runs again with the same "
            "output= and resume=auto"
        )
    if unmeasured:
        sentences.append(f"not measured: {', '.join(unmeasured)}")
    if not compared:
        sentences.append("nothing to compare: fewer than two rows have an undisturbed speed")
    elif all(pair.low is None for pair in compared):
        sentences.append(f"{NO_DIFFERENCE}: at least repeats=2 is needed, repeats=5 is better")
    elif len(fastest) == len(names):
        fewest = min(pair.pairs for pair in compared)
        hint = ""
        if fewest < 4:
            hint = f"; {fewest} repeats show only very large ones, try repeats=5"
        sentences.append(f"{NO_DIFFERENCE} between {', '.join(fastest)}{hint}")
    else:
        sentence = f"fastest: {', '.join(fastest)}"
        if len(fastest) > 1:
            sentence += f", {NO_DIFFERENCE} between them"
        sentences.append(sentence)
    if any(row.label == STAND_IN for row in table):
        sentences.append(
            f"rows marked '{STAND_IN}' used cores instead of GPUs; on GPUs the order may differ"
        )
    return sentences


def select_sound(table: Sequence[EntryFigures], pairs: Sequence[Difference]) -> list[Difference]:
    """Return the pairs in which neither entry failed or disagrees with `single`."""
    good = {row.entry for row in table if not row.error and row.exactness.verdict != "disagrees"}
    return [pair for pair in pairs if {pair.first, pair.second} <= good]


def _passes_through(row: Entry) -> bool:
    return any(
        (result.get("data_parallel") or {}).get("pass_through") for result in row.results.values()
    )


def _format_label(row: Entry) -> str:
    if _passes_through(row):
        return PASS_THROUGH
    if row.speeds and not row.fair_speeds:
        return DISTURBED
    devices: list[str] = next((result["devices"] for result in row.results.values()), [])
    if len(devices) > 1 and all(name.startswith("cpu") for name in devices):
        return STAND_IN
    return ""


def compare_losses(entry: Entry, reference: Entry | None) -> Exactness:
    """Compare the losses of an entry with those of `single`.

    Args:
        entry: the entry to judge.
        reference: the entry of `single`; None if `single` is not among the entries.
    """
    if entry is reference:
        return Exactness("reference", "reference")
    if not entry.recipe.traits.same_maths:
        return Exactness("other maths", "not same maths")
    if not entry.losses:
        return Exactness("not compared", "-")
    if reference is None or not reference.losses:
        return Exactness("not compared", UNCHECKED)
    changed = changed_keys(reference.recipe, entry.recipe).keys() - SAME_MATHS
    if changed:
        return Exactness("not compared", f"other {', '.join(sorted(changed))}")
    deviation = compute_deviation(entry.losses, reference.losses)
    rounding = compute_deviation(reference.rounded, reference.losses)
    tolerance = TOLERANCE[entry.recipe.precision]
    if deviation <= max(tolerance, min(ROUNDING_FACTOR * rounding, MAX_TOLERANCE)):
        return Exactness("exact", "exact", deviation)
    # Either run may have logged fewer steps: only steps that both have are summed.
    steps = min(len(entry.losses), len(reference.losses))
    total = math.fsum(entry.losses[:steps])
    reference_total = math.fsum(reference.losses[:steps])
    if reference.parts and total <= MAX_LOSS_RATIO * reference_total:
        return Exactness("differs", f"{reference.parts[0]}: {deviation:.1%}", deviation)
    return Exactness("disagrees", f"DISAGREES by {deviation:.1%}", deviation)

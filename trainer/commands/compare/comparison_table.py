"""The table for terminals, scripts and issues: text, compare.csv, compare.json, compare.md."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.commands.compare.comparison_report import ComparisonReport, EntryFigures
from trainer.commands.compare.significance import ERROR, LOOKS, MARGIN
from trainer.processes.terminal import as_typed
from trainer.saving.files import without_nan, write_atomically
from trainer.telemetry import readable

RED, PLAIN = "\033[31m", "\033[0m"
CSV_COLUMNS = (
    "entry", "mode", "value", "words", "ranks", "threads", "repeats", "samples_per_sec", "samples_per_sec_std", "ratio",
    "ratio_low", "ratio_high", "reference", "compared", "step_time_s", "peak_memory_bytes", "train_loss", "val_top1",
    "exactness", "deviation", "label", "error", "exit_code", "predicted_samples_per_sec",
)  # fmt: skip


def write_tables(folder: Path, report: ComparisonReport) -> None:
    """compare.json, compare.csv and compare.md, each replaced at once."""
    plain = without_nan(report.to_dict())
    write_atomically(folder / "compare.json", json.dumps(plain, indent=2, allow_nan=False) + "\n")
    write_atomically(folder / "compare.csv", as_csv(plain["entries"]))
    write_atomically(folder / "compare.md", as_markdown(report))


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as compare.json has them, one line each, with a column for each of CSV_COLUMNS."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        speed, ratio, compared = (row[key] or {} for key in ("samples_per_sec", "ratio", "compared"))
        flat = {
            "words": " ".join(row["words"]),
            "samples_per_sec": speed.get("mean"),
            "samples_per_sec_std": speed.get("std"),
            "ratio": ratio.get("median"),
            "ratio_low": ratio.get("low"),
            "ratio_high": ratio.get("high"),
            "compared": compared.get("verdict"),
            "peak_memory_bytes": max(row["peak_memory_bytes"].values(), default=None),
            "exactness": row["exactness"]["text"],
            "deviation": row["exactness"]["deviation"],
        }
        writer.writerow({**row, **flat})
    return text.getvalue()


def columns(rows: Sequence[EntryFigures]) -> list[list[str]]:
    """The table in words, its head first."""
    references = list(dict.fromkeys(row.reference for row in rows))
    to = references[0] if len(references) == 1 else "single"
    head = ["entry", "ranks x threads", "images/s", f"ratio to {to}", "", "step ms", "peak GiB"]
    head += ["loss", "maths", "note"]
    predicted = any(row.predicted_samples_per_sec is not None for row in rows)
    table = [head + ["predicted"] * predicted]
    for row in rows:
        speed, ratio = row.samples_per_sec, row.ratio
        peak = max(row.peak_memory_bytes.values(), default=None)
        cells = [
            row.entry,
            f"{row.ranks} x {row.threads}" if speed or not row.error else "-",
            spread(speed.mean, speed.std) if speed else "-",
            f"{ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})" if ratio else "-",
            row.compared.verdict if row.compared else "",
            readable.number(1e3 * row.step_time_s) if row.step_time_s else "-",
            f"{peak / 2**30:.2f}" if peak else "-",
            f"{row.train_loss:.4f}" if row.train_loss is not None else "-",
            row.exactness.text,
            f"exit {row.exit_code}: {row.error}" if row.error else row.label,
        ]
        expected = row.predicted_samples_per_sec
        table.append([*cells, *[readable.number(expected) if expected is not None else "-"] * predicted])
    return table


def as_text(report: ComparisonReport, colour: bool = False) -> str:
    """The table for a terminal; errors and long notes stand below it. Rows that disagree are red."""
    table = columns(report.entries)
    notes: list[str] = []
    for row, cells in zip(report.entries, table[1:], strict=True):
        if len(cells[9]) > len("CPU stand-in"):
            notes.append(f"{row.entry}: {cells[9]}")
            cells[9] = f"exit {row.exit_code}" if row.error else cells[9].partition(":")[0]
    lines = [as_typed(line) for line in readable.table(table, right={2, 5, 6, 7})]
    for position, row in enumerate(report.entries, 1):
        if colour and row.disagrees:
            lines[position] = f"{RED}{lines[position]}{PLAIN}"
    return "\n".join([*lines, "", *map(as_typed, (*notes, *report.conclusion))])


def as_markdown(report: ComparisonReport) -> str:
    """To paste into an issue: command, table, what it says, how it was measured, machine, versions."""
    head, *rest = columns(report.entries)
    head = [cell or "compared" for cell in head]
    lines = [f"### {report.recipe}: {len(rest)} ways compared", "", f"    {report.command}", ""]
    lines += [_row(head), _row(["---"] * len(head))]
    for row, cells in zip(report.entries, rest, strict=True):
        lines.append(_row([f"**{cell}**" if row.disagrees and cell else cell.replace("|", "\\|") for cell in cells]))
    lines += ["", *(f"- {sentence}" for sentence in report.conclusion), "", method(report), ""]
    lines += [f"Machine: {report.machine}."]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items() if version)
    return "\n".join([*lines, f"Versions: {versions}.", ""])


def method(report: ComparisonReport) -> str:
    """How the figures came about, and what they may be taken to say."""
    runs = f"{report.repeats} interleaved repeat{'s' * (report.repeats != 1)} in fresh processes"
    looks = "" if report.asked.repeats else f", over looks after {', '.join(map(str, LOOKS))} repeats"
    steps = f" of {report.steps} steps" if report.steps else ""
    size = f", {report.warmup_steps} of them warm-up and left out, global batch {report.batch_size}"
    return (
        f"{runs}{steps}{size}; images/s: mean +- standard deviation over repeats; ratio: median (least-greatest) of "
        f"the repeats' ratios. A difference is shown where the confidence interval of the paired ratios lies beyond "
        f"+-{MARGIN:.0%} (t-tests, plain and trimmed; all claims together wrong in at most {ERROR:.0%} of "
        f"comparisons: Holm{looks}). Maths: the first losses against single's."
    )


def spread(mean: float, std: float | None) -> str:
    """Mean and standard deviation, with as many decimals; without the latter where there is none."""
    shown = readable.number(mean)
    if std is None:
        return shown
    return f"{shown} +- {std:,.{len(shown.partition('.')[2])}f}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"

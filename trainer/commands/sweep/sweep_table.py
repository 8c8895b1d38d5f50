"""A sweep for terminals, scripts and issues: text, sweep.csv, sweep.json, sweep.md."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from trainer.commands.sweep.results import Metric, SweepReport, TrialFigures
from trainer.processes.terminal import BOLD, as_typed, styled
from trainer.saving.files import csv_text, without_nan, write_atomically
from trainer.telemetry import readable

SHOWN = 20  # rows on a terminal
NOTE = 40  # characters of a note within the table
FIGURES = ("status", "value", "std", "epochs", "seconds", "compared", "error", "exit_code")  # columns of sweep.csv


def write_tables(folder: Path, report: SweepReport, metric: Metric) -> None:
    """sweep.json, sweep.csv and sweep.md, each replaced at once."""
    plain = without_nan(report.to_dict())
    write_atomically(folder / "sweep.json", json.dumps(plain, indent=2, allow_nan=False) + "\n")
    write_atomically(folder / "sweep.csv", as_csv(report))
    write_atomically(folder / "sweep.md", as_markdown(report, metric))


def as_csv(report: SweepReport) -> str:
    """A line a trial, best first."""
    rows: list[list[Any]] = [["trial", *report.keys, *FIGURES, "folder"]]
    for row in report.trials:
        figures = [getattr(row, name) for name in FIGURES]
        rows.append([row.trial, *(row.values[key] for key in report.keys), *figures, " ".join(row.folders)])
    return csv_text(rows)


def columns(report: SweepReport, metric: Metric) -> list[list[str]]:
    """The table in words, its head first."""
    spread = f" +- std of {report.repeats} seeds" if report.repeats > 1 else ""
    compared = "compared" if any(row.compared for row in report.trials) else ""
    table = [["trial", *report.keys, f"{metric.name}{spread}", compared, "time", "note"]]
    for row in report.trials:
        value = metric.text(row.value) if row.value is not None else "-"
        value += f" +- {metric.spread(row.std)}" if row.std is not None else ""
        time = readable.duration(row.seconds) if row.seconds else "-"
        values = (row.values[key] for key in report.keys)
        table.append([str(row.trial), *values, value, row.compared or "", time, note(row)])
    return table


def note(row: TrialFigures) -> str:
    """What is to be said of a row."""
    if row.status == "failed":
        return f"exit {row.exit_code}: {row.error}"
    if row.status == "ended early":
        return f"ended early, after {row.epochs} epoch{'s' * (row.epochs != 1)}"
    return "" if row.status == "done" else "not done"


def as_text(report: SweepReport, metric: Metric) -> str:
    """The table for a terminal; the best row is bold, and long notes stand below."""
    table = columns(report, metric)
    shown, below = table[: SHOWN + 1], []
    for row, cells in zip(report.trials, shown[1:], strict=False):
        if len(cells[-1]) > NOTE:
            below.append(f"trial {row.trial}: {cells[-1]}")
            cells[-1] = cells[-1].partition(":")[0]
    right = {0, len(report.keys) + 3}
    lines = [as_typed(line) for line in readable.table(shown, right)]
    if report.done:
        lines[1] = styled(lines[1], BOLD)
    if len(table) > len(shown):
        lines.append(f"and {len(table) - len(shown)} more in sweep.md")
    return "\n".join([*lines, "", *map(as_typed, (*below, *report.conclusion))])


def as_markdown(report: SweepReport, metric: Metric) -> str:
    """To paste into an issue: command, table, what it says, the winning command, versions."""
    lines = [f"### {report.recipe}: {len(report.trials)} trials", "", f"    {report.command}", ""]
    lines += readable.markdown_table(columns(report, metric), [0] if report.done else [])
    lines += ["", *(f"- {sentence}" for sentence in report.conclusion), ""]
    if report.best:
        lines += ["Best:", "", f"    {shlex.join(report.best)}", ""]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items() if version)
    return "\n".join([*lines, f"Versions: {versions}.", ""])

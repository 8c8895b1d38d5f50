"""The comparison for terminals, scripts and issues: text, compare.csv, compare.json, compare.md; in pictures; and in
TensorBoard, a run an entry under tensorboard/."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.commands.compare.comparison_report import ComparisonReport, EntryFigures
from trainer.commands.compare.entries import Entry, Sweep
from trainer.commands.trials import report as reports
from trainer.commands.trials.significance import ERROR, LOOKS, MARGIN
from trainer.processes.terminal import RED
from trainer.telemetry import plots, readable
from trainer.telemetry.events import Curve, Events, curves_of

CSV_COLUMNS = (
    "entry", "mode", "value", "words", "ranks", "threads", "repeats", "samples_per_sec", "samples_per_sec_std", "ratio",
    "ratio_low", "ratio_high", "reference", "compared", "step_time_s", "peak_memory_bytes", "train_loss", "val_top1",
    "exactness", "deviation", "label", "error", "exit_code",
)  # fmt: skip
SPEED = "images per second"
LEARNT = (  # picture, curve, its label
    ("loss", "train/loss", "training loss"), ("accuracy", "val/top1", "top-1 accuracy"),
    ("throughput", "speed/samples_per_sec", SPEED),
)  # fmt: skip


def write_tables(folder: Path, report: ComparisonReport) -> None:
    """compare.json, compare.csv and compare.md."""
    plain = asdict(report)
    reports.write_tables(folder, "compare", plain, as_markdown(report), csv_rows(plain["entries"]))


def csv_rows(entries: Sequence[Mapping[str, Any]]) -> list[Sequence[Any]]:
    """Entries as compare.json has them, with a column for each of CSV_COLUMNS."""
    rows: list[Sequence[Any]] = [CSV_COLUMNS]
    for row in entries:
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
        rows.append([{**row, **flat}[column] for column in CSV_COLUMNS])
    return rows


def columns(rows: Sequence[EntryFigures]) -> list[list[str]]:
    """The table in words, its head first."""
    references = list(dict.fromkeys(row.reference for row in rows))
    to = references[0] if len(references) == 1 else "single"
    head = ["entry", "ranks x threads", "images/s", f"ratio to {to}", "compared", "step ms", "peak GiB", "loss"]
    table = [[*head, "maths", "note"]]
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
        table.append(cells)
    return table


def as_text(report: ComparisonReport) -> str:
    """The table for a terminal; rows that disagree are red."""
    head, *rows = columns(report.entries)
    head[4] = ""
    red = {n: RED for n, row in enumerate(report.entries) if row.disagrees}
    return reports.as_text([head, *rows], {2, 5, 6, 7}, red, report.conclusion)


def as_markdown(report: ComparisonReport) -> str:
    """To paste into an issue: command, table, what it says, how it was measured, machine, versions."""
    bold = [n for n, row in enumerate(report.entries) if row.disagrees]
    title = f"{report.recipe}: {len(report.entries)} ways compared"
    more = method(report), f"Machine: {report.machine}.\n{reports.versions_line(report.versions)}"
    return reports.as_markdown(title, report.command, columns(report.entries), bold, report.conclusion, *more)


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
    """Mean and standard deviation, with as many decimals; without the latter where there is none.

    A mean that is smaller than its deviation is no figure.
    """
    if std is not None and std > mean:
        return "scatters"
    shown = readable.number(mean)
    if std is None:
        return shown
    return f"{shown} +- {std:,.{len(shown.partition('.')[2])}f}"


def draw(folder: Path, report: ComparisonReport, entries: Sequence[Entry], sweep: Sweep | None) -> list[Path]:
    """Every picture that there is something to show in; returns their paths."""
    rows = report.entries
    title = f"{report.recipe}, global batch {report.batch_size}"
    made = [_bars(folder / "compare.png", rows, title), _memory(folder / "memory.png", rows, title)]
    if sweep:
        made.append(_sweep(folder / "sweep.png", rows, entries, sweep, title))
    learnt = {entry.name: curves_of(folder / "tensorboard" / entry.slug) for entry in entries}
    made += _learning(folder, {name: curves for name, curves in learnt.items() if curves}, title)
    return [path for path in made if path.exists()]


def _bars(path: Path, rows: Sequence[EntryFigures], title: str) -> Path:
    bars = []
    for row, cells in zip(rows, columns(rows)[1:], strict=True):
        speed, ratio = row.samples_per_sec, row.ratio
        words = f"{cells[2].replace('+-', '±')}" if speed else f"exit {row.exit_code}"
        words += f",  {ratio.median:.2f}x" if ratio else ""
        words += f"  ({row.label.partition(':')[0]})" if row.label and speed else ""
        bars.append(plots.Bar(row.entry, speed.mean if speed else None, (speed.std or 0.0) if speed else 0.0, words))
    most = max((row.repeats for row in rows), default=0)
    plots.bars(path, bars, SPEED, f"{title}: mean and standard deviation of {most} repeat{'s' * (most != 1)}")
    return path


def _memory(path: Path, rows: Sequence[EntryFigures], title: str) -> Path:
    bars = []
    for row in rows:
        sizes = [size / 2**30 for size in row.peak_memory_bytes.values()]
        words = f"{max(sizes):.2f}" + (f" on each of {len(sizes)}" if len(sizes) > 1 else "") if sizes else ""
        bars.append(plots.Bar(row.entry, max(sizes, default=None), 0.0, words or f"exit {row.exit_code}"))
    plots.bars(path, bars, "peak memory of the fullest device, GiB", title)
    return path


def _sweep(path: Path, rows: Sequence[EntryFigures], entries: Sequence[Entry], sweep: Sweep, title: str) -> Path:
    series: dict[str, list[plots.Point]] = {}
    for row, entry in zip(rows, entries, strict=True):
        if speed := row.samples_per_sec:
            is_number = isinstance(row.value, int | float) and not isinstance(row.value, bool)
            x = None if entry.name == entry.series else row.value if is_number else json.dumps(row.value)
            series.setdefault(entry.series, []).append(plots.Point(x, speed.mean, speed.std or 0.0))
    if series:
        plots.sweep(path, sweep.key, series, SPEED, title)
    return path


def _learning(folder: Path, learnt: Mapping[str, Mapping[str, Curve]], title: str) -> list[Path]:
    """Loss, and accuracy where it was measured more than once, over steps and over seconds; speed over seconds."""
    made = []
    for name, tag, label in LEARNT:
        least = 0 if name == "throughput" else 1
        curves = {entry: tags[tag] for entry, tags in learnt.items() if len(tags.get(tag, ([],))[0]) > least}
        if curves:
            steps = {entry: (steps, values) for entry, (steps, _, values) in curves.items()}
            seconds = {entry: (seconds, values) for entry, (_, seconds, values) in curves.items()}
            every = [value for *_, curve in curves.values() for value in curve]
            log = name == "loss" and 0 < min(every) < max(every) / 50  # else the ends would lie on the axis
            panels = [plots.Panel(steps, "optimizer steps", label, log), plots.Panel(seconds, "seconds", label, log)]
            plots.curves(folder / f"{name}.png", panels[1 - least :], title)
            made.append(folder / f"{name}.png")
    return made


def to_tensorboard(folder: Path, report: ComparisonReport, entries: Sequence[Entry], pictures: Sequence[Path]) -> None:
    """The table as text and the pictures as images; beside each entry's curves its speed in every repeat.

    Table and pictures are told with the first entry's curves: a run of their own would have no curves, of which
    Custom Scalars warns.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    home = folder / "tensorboard"
    for old in home.glob("*/*.compared"):
        old.unlink()
    ran = [(entry, row.samples_per_sec) for entry, row in zip(entries, report.entries, strict=True)]
    ran = [(entry, speed) for entry, speed in ran if speed]
    writer = Events(home / (ran[0][0] if ran else entries[0]).slug, ".compared")
    writer.text("compare", as_markdown(report), 0)
    for n, path in enumerate(pictures, 1):
        picture = Summary.Image(encoded_image_string=path.read_bytes())
        writer.add(Summary(value=[Summary.Value(tag=f"compare/{n}_{path.stem}", image=picture)]), 0)
    writer.close()
    for entry, figures in ran:
        writer = Events(home / entry.slug, ".compared")
        for repeat, speed in figures.runs.items() if figures else ():
            writer.scalars({"compare/samples_per_sec": speed}, int(repeat))
        writer.close()

"""The results of a sweep: a row a trial, best first, which claims about the best hold, tables and picture."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from trainer.commands.compare.ranking import NO_DIFFERENCE
from trainer.commands.sweep.space import Dimension
from trainer.commands.trials import report as reports
from trainer.commands.trials.engine import TrialOutcome
from trainer.commands.trials.significance import ERROR, MARGIN, differences
from trainer.processes.terminal import BOLD
from trainer.telemetry import plots, readable

ORDER = ("done", "not done", "failed")  # what a trial's status may be
SPEED = "images/s"  # as the name of a metric
WIDEST = 100  # characters of a trial's folder


@dataclass(frozen=True)
class Metric:
    """What is looked for: the task's metric, of the held-out images, or images/s."""

    name: str
    larger_is_better: bool
    about: str  # what it is, as a sentence

    def text(self, value: float | None) -> str:
        return readable.number(value) if self.name == SPEED else readable.score(self.name, value)


@dataclass
class TrialFigures:
    """A row of the table: a choice of values, and what its runs left."""

    trial: int  # its number, in the order in which trials run, from 1 on
    values: dict[str, str]  # of the swept keys, as one types them
    status: str = "not done"
    value: float | None = None  # mean of the metric over the runs
    std: float | None = None
    runs: dict[int, float] = field(default_factory=dict)  # the metric by seed; none of a trial that failed
    seconds: float = 0.0  # of training, of all runs together
    # with the best: "worse", or that no difference is shown; null for the best and where nothing can be said
    compared: str | None = None
    error: str | None = None
    exit_code: int = 0
    folders: list[str] = field(default_factory=list)  # of the runs

    @property
    def words(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.values.items()]

    def name(self, seed: int | None) -> str:
        """Of the folder of its run with the recipe's own seed, or with another one."""
        text = "-".join([*self.words, *([f"seed={seed}"] if seed is not None else [])])
        return f"{self.trial:03d}-" + re.sub(r"[^A-Za-z0-9_.=+]+", "-", text)[:WIDEST].strip("-")

    def add(self, seed: int, outcome: TrialOutcome, seconds: float, folder: Path, repeats: int) -> None:
        """One of `repeats` runs has ended."""
        self.seconds += seconds
        self.folders.append(str(folder))
        if outcome.error is None:
            self.runs[seed] = outcome.value
        elif self.error is None:
            self.error, self.exit_code = str(outcome.error), outcome.error.code
        if self.error is not None:
            self.runs.clear()
        self.status = "failed" if self.error is not None else "done" if len(self.runs) >= repeats else "not done"
        self.value = fmean(self.runs.values()) if self.runs else None
        self.std = stdev(self.runs.values()) if len(self.runs) > 1 else None


def tabulate(trials: Sequence[TrialFigures], metric: Metric, images: int) -> list[TrialFigures]:
    """The rows, best first, then those that are not done, or failed; `images` were held out, at least."""
    sign = -1 if metric.larger_is_better else 1

    def rank(row: TrialFigures) -> tuple[int, float, int]:
        return ORDER.index(row.status), math.inf if row.value is None else sign * row.value, row.trial

    return _compared(sorted(trials, key=rank), metric, images)


def _compared(rows: list[TrialFigures], metric: Metric, images: int) -> list[TrialFigures]:
    """With what repeats say of the best row and each other one.

    On few images several seeds often have the very same accuracy, as if there were no chance in it: so the standard
    deviation of a run is taken to be one image at least.

    Which row is the best was chosen by the same figures. So the error is that of all pairs: each row may have been the
    best, and of a pair only one direction is claimed, hence 2 / rows of it for the pairs of one row.
    """
    done = {str(row.trial): row.runs for row in rows if row.status == "done"}
    if len(done) < 2 or len(rows[0].runs) < 2:
        return rows
    best, *others = done
    among, margin, least = [(best, other) for other in others], MARGIN, 0.0
    if metric.name != SPEED:  # `differences` compares logarithms; of a metric plain differences count
        scale = max(abs(value) for runs in done.values() for value in runs.values()) or 1.0
        done = {name: {seed: math.exp(value / scale) for seed, value in runs.items()} for name, runs in done.items()}
        margin, is_share = 0.0, metric.name in readable.FRACTIONS and images
        least = math.sqrt(2) / images / scale if is_share else 0.0
    pairs = differences(done, ERROR * 2 / len(done), margin, among, least)
    verdicts = {int(pair.second): "worse" if pair.verdict else NO_DIFFERENCE for pair in pairs}
    return [replace(row, compared=verdicts.get(row.trial)) for row in rows]


def conclusion(rows: Sequence[TrialFigures], repeats: int, metric: Metric) -> list[str]:
    """What may be said, in sentences."""
    done = [row for row in rows if row.status == "done"]
    sentences = [metric.about] if done else []
    if done and metric.name != SPEED:
        best = f"the best of {readable.counted(len(done), 'trial')} was chosen by this figure"
        sentences.append(f"{best}, which is therefore optimistic: images that no trial has seen tell more")
    if len(done) > 1 and repeats == 1:
        sentences.append(f"{NO_DIFFERENCE}: that takes several seeds, type repeats=3")
    elif len(done) > 1:
        worse = sum(row.compared == "worse" for row in done)
        few = f"; {repeats} seeds show only large differences" if repeats < 5 else ""
        sentences.append(f"trial {done[0].trial} is shown to be better than {worse} of {len(done) - 1} others{few}")
    if failed := sum(row.status == "failed" for row in rows):
        sentences.append(f"{readable.counted(failed, 'trial')} failed")
    return sentences


def write_tables(folder: Path, report: Mapping[str, Any], metric: Metric) -> None:
    """sweep.json, sweep.csv, a line a trial, best first, and sweep.md, to paste into an issue."""
    keys, figures = report["keys"], ("status", "value", "std", "seconds", "compared", "error", "exit_code")
    rows: list[list[Any]] = [["trial", *keys, *figures, "folder"]]
    for row in report["trials"]:
        cells = {**row["values"], **row}
        rows.append([row["trial"], *(cells[key] for key in (*keys, *figures)), " ".join(row["folders"])])
    more = [f"Best:\n\n    {shlex.join(report['best'])}"] if report["best"] else []
    more.append(reports.versions_line(report["versions"]))
    title, best = f"{report['recipe']}: {len(report['trials'])} trials", [0] if report["best"] else []
    page = reports.as_markdown(title, report["command"], columns(report, metric), best, report["conclusion"], *more)
    reports.write_tables(folder, "sweep", report, page, rows)


def columns(report: Mapping[str, Any], metric: Metric) -> list[list[str]]:
    """The table in words, its head first."""
    compared = "compared" if any(row["compared"] for row in report["trials"]) else ""
    seeds = f" +- std of {report['repeats']} seeds" if report["repeats"] > 1 else ""
    table = [["trial", *report["keys"], metric.name + seeds, compared, "time", "note"]]
    for row in report["trials"]:
        value, took = metric.text(row["value"]), readable.duration(row["seconds"] or None)
        value += f" +- {metric.text(row['std']).removesuffix('%')}" if row["std"] is not None else ""
        note = f"exit {row['exit_code']}: {row['error']}" if row["error"] else "not done" * (row["status"] != "done")
        values = (row["values"][key] for key in report["keys"])
        table.append([str(row["trial"]), *values, value, row["compared"] or "", took, note])
    return table


def as_text(report: Mapping[str, Any], metric: Metric) -> str:
    """The table for a terminal; the best row is bold."""
    right, best = {0, len(report["keys"]) + 3}, {0: BOLD} if report["best"] else {}
    return reports.as_text(columns(report, metric), right, best, report["conclusion"], reports.SHOWN)


def draw(folder: Path, report: Mapping[str, Any], dimensions: Sequence[Dimension]) -> list[Path]:
    """sweep.png, where a trial has a figure: the metric over each key, all trials in every panel, the best one ringed.

    Values of a list lie evenly, as they were typed; those of a range on its scale.
    """
    done = [row for row in report["trials"] if row["status"] == "done"]
    if not done:
        return []
    count, scale, repeats = len(dimensions), 100.0 if report["metric"] in readable.FRACTIONS else 1.0, report["repeats"]
    figure, panels = plots.canvas(max(8.0, 3.6 * count), 4.4, count)
    y, std = ([scale * (row[key] or 0.0) for row in done] for key in ("value", "std"))
    for axes, part in zip(panels, dimensions, strict=True):
        values = [row["values"][part.key] for row in done]
        x = [float(value) if part.ends else float(part.values.index(value)) for value in values]
        axes.errorbar(x, y, yerr=std if repeats > 1 else None, color=plots.COLOURS[0], fmt="o", capsize=4)
        if count == 1 and not part.ends:
            axes.plot(*zip(*sorted(zip(x, y, strict=True)), strict=True), color=plots.COLOURS[0])
        axes.plot(x[:1], y[:1], "o", color=plots.COLOURS[3], markersize=15, markeredgewidth=2, fillstyle="none")
        axes.set_xlabel(part.key)
        if part.ends:
            axes.set_xscale("log" if part.log else "linear")
        else:
            axes.set_xticks(range(len(part.values)), part.values)
    panels[0].set_ylabel(report["metric"] + ", %" * (scale > 1))
    title = f"{report['recipe']}: {len(done)} of {len(report['trials'])} trials"
    title += f"; mean and standard deviation of {repeats} seeds" * (repeats > 1)
    figure.suptitle(title, color=plots.INK, fontsize=11)
    plots.save_picture(figure, folder / "sweep.png")
    return [folder / "sweep.png"]

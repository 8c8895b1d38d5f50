"""The results of a sweep: a row a trial, best first, which claims about the best hold, tables and picture."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.commands.compare.ranking import NO_DIFFERENCE
from trainer.commands.sweep.space import Dimension, SweepTrial
from trainer.commands.trials import report as reports
from trainer.commands.trials.significance import ERROR, MARGIN, differences, mean_and_std
from trainer.processes.terminal import BOLD
from trainer.telemetry import plots, readable

ORDER = ("done", "not done", "failed")  # what a trial's status may be
SPEED = "images/s"  # as the name of a metric


@dataclass(frozen=True)
class Metric:
    """What is looked for: the task's metric, of the held-out images, or images/s."""

    name: str
    larger_is_better: bool
    about: str  # what it is, as a sentence

    def text(self, value: float | None) -> str:
        return readable.number(value) if self.name == SPEED else readable.score(self.name, value)


@dataclass(frozen=True)
class RunFigures:
    """How a run ended."""

    value: float | None  # of the metric; None where it failed
    seconds: float = 0.0  # of training, over all parts of the run
    images: int = 0  # that were held out
    folder: str = ""
    error: str | None = None  # why it failed; None where it did not
    code: int = 0  # exit code; 0 where it did not fail


@dataclass(frozen=True)
class TrialFigures:
    """A row of the table."""

    trial: int  # its number, in the order in which trials ran
    values: dict[str, str]
    status: str
    value: float | None  # mean of the metric over the runs
    std: float | None
    runs: dict[int, float]  # the metric by seed
    seconds: float  # of training, of all runs together
    # with the best: "worse", or that no difference is shown; null for the best and where nothing can be said
    compared: str | None
    error: str | None
    exit_code: int
    folders: list[str]  # of the runs


def tabulate(
    trials: Sequence[SweepTrial], runs: Mapping[int, Mapping[int, RunFigures]], repeats: int, metric: Metric
) -> list[TrialFigures]:
    """The rows, best first, then those that are not done, or failed; `runs` are by trial and seed."""
    rows = [_row(trial, runs.get(trial.number, {}), repeats) for trial in trials]
    sign = -1 if metric.larger_is_better else 1
    rows.sort(key=lambda row: (ORDER.index(row.status), math.inf if row.value is None else sign * row.value, row.trial))
    images = min((run.images for each in runs.values() for run in each.values()), default=0)
    return _compared(rows, metric, images)


def _row(trial: SweepTrial, runs: Mapping[int, RunFigures], repeats: int) -> TrialFigures:
    failed = next((run for run in runs.values() if run.error is not None), None)
    values = {seed: run.value for seed, run in runs.items() if run.value is not None and not failed}
    mean, std = mean_and_std(list(values.values())) if values else (None, None)
    return TrialFigures(
        trial=trial.number,
        values=dict(trial.values),
        status="failed" if failed else "done" if len(values) >= repeats else "not done",
        value=mean,
        std=std if len(values) > 1 else None,
        runs=values,
        seconds=sum(run.seconds for run in runs.values()),
        compared=None,
        error=failed.error if failed else None,
        exit_code=failed.code if failed else 0,
        folders=[run.folder for run in runs.values()],
    )


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
        values = (row["values"][key] for key in keys)
        rows.append([row["trial"], *values, *(row[name] for name in figures), " ".join(row["folders"])])
    bold, more = [], [reports.versions_line(report["versions"])]
    if report["best"]:
        bold, more = [0], [f"Best:\n\n    {shlex.join(report['best'])}", *more]
    title, table = f"{report['recipe']}: {len(report['trials'])} trials", columns(report, metric)
    page = reports.as_markdown(title, report["command"], table, bold, report["conclusion"], *more)
    reports.write_tables(folder, "sweep", report, page, rows)


def columns(report: Mapping[str, Any], metric: Metric) -> list[list[str]]:
    """The table in words, its head first."""
    keys, repeats = report["keys"], report["repeats"]
    compared = "compared" if any(row["compared"] for row in report["trials"]) else ""
    table = [
        ["trial", *keys, f"{metric.name}{f' +- std of {repeats} seeds' * (repeats > 1)}", compared, "time", "note"]
    ]
    for row in report["trials"]:
        value = metric.text(row["value"])
        value += f" +- {metric.text(row['std']).removesuffix('%')}" if row["std"] is not None else ""
        note = f"exit {row['exit_code']}: {row['error']}" if row["error"] else "not done" * (row["status"] != "done")
        took, values = readable.duration(row["seconds"] or None), (row["values"][key] for key in keys)
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

"""The results of a sweep: a row a trial, best first, which claims about the best hold, and their tables."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trainer.commands.compare.ranking import NO_DIFFERENCE
from trainer.commands.sweep.space import SweepTrial
from trainer.commands.trials import report as reports
from trainer.commands.trials.significance import ERROR, differences, mean_and_std
from trainer.processes.terminal import BOLD
from trainer.telemetry import readable

Status = Literal["done", "failed", "not done"]
MOST = 8  # trials that a sentence lists
ORDER: tuple[Status, ...] = ("done", "not done", "failed")
FIGURES = ("status", "value", "std", "epochs", "seconds", "compared", "error", "exit_code")  # columns of sweep.csv


@dataclass(frozen=True)
class Metric:
    """The task's metric, of the held-out images, and what these are, in words."""

    name: str
    larger_is_better: bool
    images: str

    def text(self, value: float | None) -> str:
        return readable.score(self.name, value)

    def spread(self, value: float) -> str:
        """A standard deviation, in the metric's unit."""
        return self.text(value).removesuffix("%")


@dataclass(frozen=True)
class RunFigures:
    """How a run ended."""

    value: float | None  # of the metric in its best epoch; None where it failed
    epochs: int  # that were evaluated
    seconds: float  # of training, over all parts of the run
    images: int = 0  # that were held out
    folder: str = ""
    error: str | None = None  # why it failed; None where it did not
    code: int = 0  # exit code; 0 where it did not fail


@dataclass(frozen=True)
class TrialFigures:
    """A row of the table."""

    trial: int  # its number, in the order in which trials ran
    values: dict[str, str]
    status: Status
    value: float | None  # mean of the metric over the runs; of each its best epoch
    std: float | None  # standard deviation
    runs: dict[int, float]  # the metric by seed
    epochs: int  # that were trained in all runs together
    seconds: float  # of training, of all runs together
    # with the best: "worse", or that no difference is shown; null for the best and where nothing can be said
    compared: str | None
    error: str | None
    exit_code: int
    folders: list[str]  # of the runs


@dataclass(frozen=True)
class SweepReport:
    """All of it."""

    recipe: str
    status: str
    command: str
    asked: dict[str, Any]
    keys: list[str]
    logarithmic: list[str]
    repeats: int
    metric: str
    larger_is_better: bool
    images: str
    trials: list[TrialFigures]
    conclusion: list[str]
    best: list[str] | None
    seconds: float
    versions: dict[str, str | None]

    @property
    def done(self) -> list[TrialFigures]:
        return [row for row in self.trials if row.status == "done"]


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
        epochs=sum(run.epochs for run in runs.values()),
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
    done = {str(row.trial): row for row in rows if row.status == "done"}
    if len(done) < 2 or len(rows[0].runs) < 2:
        return rows
    best, *others = done
    scale = max(abs(value) for row in done.values() for value in row.runs.values()) or 1.0
    # `differences` compares logarithms; of a metric plain differences count.
    logs = {name: {seed: math.exp(value / scale) for seed, value in row.runs.items()} for name, row in done.items()}
    least = math.sqrt(2) / images / scale if metric.name in readable.FRACTIONS and images else 0.0
    among = [(best, other) for other in others]
    pairs = differences(logs, ERROR * 2 / len(done), margin=0.0, among=among, least=least)
    verdicts = {int(pair.second): "worse" if pair.verdict else NO_DIFFERENCE for pair in pairs}
    return [replace(row, compared=verdicts.get(row.trial)) for row in rows]


def conclusion(rows: Sequence[TrialFigures], repeats: int, metric: Metric) -> list[str]:
    """What may be said, in sentences."""
    done = [row for row in rows if row.status == "done"]
    sentences = []
    if done:
        best = f"trial {done[0].trial}"
        sentences += [
            f"{metric.name} is that of each run's best epoch, on {metric.images}",
            f"the best of {readable.counted(len(done), 'trial')} was chosen by this figure, which is therefore "
            "optimistic: images that no trial has seen tell more",
        ]
    if len(done) > 1 and repeats == 1:
        sentences.append(f"{NO_DIFFERENCE}: that takes several seeds, type repeats=3")
    elif len(done) > 1:
        alike = [row for row in done[1:] if row.compared == NO_DIFFERENCE]
        worse = [row for row in done[1:] if row.compared != NO_DIFFERENCE]
        if alike:
            few = f"; {repeats} seeds show only large differences" if repeats < 5 else ""
            sentences.append(f"{NO_DIFFERENCE} between {best} and {_listed(alike)}{few}")
        if worse:
            sentences.append(f"{best} is shown to be better than {_listed(worse)}")
    if failed := sum(row.status == "failed" for row in rows):
        sentences.append(f"{readable.counted(failed, 'trial')} failed")
    return sentences


def _listed(rows: Sequence[TrialFigures]) -> str:
    """Rows by their trials' numbers, or how many they are."""
    numbers = ", ".join(str(number) for number in sorted(row.trial for row in rows))
    return f"{len(rows)} others" if len(rows) > MOST else f"trial{'s' * (len(rows) > 1)} {numbers}"


def write_tables(folder: Path, report: SweepReport, metric: Metric) -> None:
    """sweep.json, sweep.md and sweep.csv, a line a trial, best first."""
    rows: list[list[Any]] = [["trial", *report.keys, *FIGURES, "folder"]]
    for row in report.trials:
        figures = [getattr(row, name) for name in FIGURES]
        rows.append([row.trial, *(row.values[key] for key in report.keys), *figures, " ".join(row.folders)])
    reports.write_tables(folder, "sweep", asdict(report), as_markdown(report, metric), rows)


def columns(report: SweepReport, metric: Metric) -> list[list[str]]:
    """The table in words, its head first."""
    spread = f" +- std of {report.repeats} seeds" if report.repeats > 1 else ""
    compared = "compared" if any(row.compared for row in report.trials) else ""
    table = [["trial", *report.keys, f"{metric.name}{spread}", compared, "time", "note"]]
    for row in report.trials:
        value = metric.text(row.value) if row.value is not None else "-"
        value += f" +- {metric.spread(row.std)}" if row.std is not None else ""
        time = readable.duration(row.seconds) if row.seconds else "-"
        note = f"exit {row.exit_code}: {row.error}" if row.error else "" if row.status == "done" else "not done"
        values = (row.values[key] for key in report.keys)
        table.append([str(row.trial), *values, value, row.compared or "", time, note])
    return table


def as_text(report: SweepReport, metric: Metric) -> str:
    """The table for a terminal; the best row is bold."""
    right, best = {0, len(report.keys) + 3}, {0: BOLD} if report.done else {}
    return reports.as_text(columns(report, metric), right, best, report.conclusion, reports.SHOWN)


def as_markdown(report: SweepReport, metric: Metric) -> str:
    """To paste into an issue: command, table, what it says, the winning command, versions."""
    best = [f"Best:\n\n    {shlex.join(report.best)}"] if report.best else []
    bold, more = [0] if report.done else [], [*best, reports.versions_line(report.versions)]
    title, table = f"{report.recipe}: {len(report.trials)} trials", columns(report, metric)
    return reports.as_markdown(title, report.command, table, bold, report.conclusion, *more)

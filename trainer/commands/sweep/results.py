"""Results of a sweep: the ranking of its trials, claims about the best one, tables and chart."""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev

from trainer.commands.compare.ranking import NO_DIFFERENCE
from trainer.commands.sweep.space import Dimension
from trainer.commands.trials import report as reports
from trainer.commands.trials.engine import TrialOutcome
from trainer.commands.trials.significance import ERROR, MARGIN, find_differences
from trainer.processes.terminal import BOLD
from trainer.recipe.metric_table import is_fraction
from trainer.saving.files import Json
from trainer.telemetry import plots, readable

# Statuses of trials, in the order in which the table lists the trials.
ORDER = ("done", "not done", "failed")
# Name of the metric of a sweep with metric=speed.
SPEED = "images/s"
# Maximum number of characters of a folder's name after the number of the trial; a longer name is
# cut.
WIDEST = 100


@dataclass(frozen=True)
class Metric:
    """Metric of a sweep: that of the task on the validation split, or images/s.

    Attributes:
        name: Name of the metric.
        larger_is_better: Whether larger values are better.
        about: Sentence that says what the metric is.
    """

    name: str
    larger_is_better: bool
    about: str

    def text(self, value: float | None) -> str:
        if self.name == SPEED:
            return readable.format_number(value)
        return readable.format_score(self.name, value)


@dataclass
class TrialFigures:
    """Row of the table: the values of a trial, and the results of its runs.

    Attributes:
        trial: Number of the trial, from 1, in the order in which trials run.
        values: Value of each swept key, as in an override.
        status: Element of `ORDER`.
        value: Mean of the metric over the runs; None if `runs` is empty.
        std: Standard deviation of the metric over the runs; None for fewer than two runs.
        runs: Metric of each run by its `TrialSample.label`; empty for a failed trial.
        seconds: Training time of all runs together in seconds.
        compared: "worse" if the trial is shown to be worse than the best one, or the text that no
            difference is shown; None for the best trial, and if the two were not compared.
        error: Error of the first failed run; None if no run failed.
        exit_code: Exit code of the first failed run; 0 if no run failed.
        folders: Folders of the runs.
    """

    trial: int
    values: dict[str, str]
    status: str = "not done"
    value: float | None = None
    std: float | None = None
    runs: dict[int | str, float] = field(default_factory=dict)
    seconds: float = 0.0
    compared: str | None = None
    error: str | None = None
    exit_code: int = 0
    folders: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.values.items()]

    def name(self, words: Sequence[str]) -> str:
        """Return the name of a run's folder. `words` are the run's `TrialSample.words`."""
        name = f"{self.trial:03d}"
        # Shorten the values on their own: cutting off `words` could give two runs one folder.
        for text in ("-".join(self.words), *words):
            if text:
                cleaned = re.sub(r"[^A-Za-z0-9_.=+]+", "-", text)
                name += "-" + cleaned[:WIDEST].strip("-")
        return name

    def add(
        self, label: int | str, outcome: TrialOutcome, seconds: float, folder: Path, repeats: int
    ) -> None:
        """Add the outcome of a run.

        Args:
            label: The run's `TrialSample.label`.
            outcome: The metric or the error of the run.
            seconds: Training time in seconds.
            folder: Folder of the run.
            repeats: Number of runs of the trial, over all folds and seeds.
        """
        self.seconds += seconds
        self.folders.append(str(folder))
        if outcome.error is None:
            self.runs[label] = outcome.value
        elif self.error is None:
            self.error = str(outcome.error)
            self.exit_code = outcome.error.code
        if self.error is not None:
            self.runs.clear()
            self.status = "failed"
        elif len(self.runs) >= repeats:
            self.status = "done"
        values = self.runs.values()
        self.value = fmean(values) if values else None
        self.std = stdev(values) if len(values) > 1 else None


def tabulate(
    trials: Sequence[TrialFigures], metric: Metric, images: int, folds: int = 0
) -> list[TrialFigures]:
    """Rank the trials, and compare each one with the best.

    Trials with folds are not compared: runs of different folds share training images, and the
    tests assume independent runs (Dietterich, Neural Computation 10, 1998, p. 1895).

    With few validation images, runs with different seeds often have exactly the same accuracy.
    Their standard deviation of 0 would mean that the accuracy does not depend on chance. So the
    standard deviation of an accuracy is assumed to be at least 1 / `images`, which is the change by
    a single image.

    The best row was chosen by the same values that are compared, and any row could have been the
    best. So the error rate has to cover all n (n - 1) / 2 pairs of n rows. Only the n - 1 pairs
    with the best row are tested, so they get the fraction 2 / n of the error rate.

    Args:
        trials: Trials in any order.
        metric: Metric of the sweep.
        images: Smallest number of validation images of a run.
        folds: Number of folds of each trial; 0 without cross-validation.

    Returns:
        The trials that are done, best first, then those not done, then the failed ones.
    """
    sign = -1 if metric.larger_is_better else 1

    def rank(row: TrialFigures) -> tuple[int, float, int]:
        value = math.inf if row.value is None else sign * row.value
        return ORDER.index(row.status), value, row.trial

    rows = sorted(trials, key=rank)
    finished = {str(row.trial): row.runs for row in rows if row.status == "done"}
    if folds or len(finished) < 2 or len(rows[0].runs) < 2:
        return rows
    best, *others = finished
    candidates = [(best, other) for other in others]
    margin = MARGIN
    least = 0.0
    if metric.name != SPEED:
        margin = 0.0
        largest = [max(map(abs, runs.values())) for runs in finished.values()]
        scale = max(largest) or 1.0
        # `find_differences` takes logarithms, because speeds are compared by their ratio. A metric
        # is compared by its difference, so pass the exponential of the metric.
        for name, runs in finished.items():
            finished[name] = {seed: math.exp(value / scale) for seed, value in runs.items()}
        if is_fraction(metric.name) and images:
            least = math.sqrt(2) / images / scale
    pairs = find_differences(finished, ERROR * 2 / len(finished), margin, candidates, least)
    verdicts = {int(pair.second): "worse" if pair.verdict else NO_DIFFERENCE for pair in pairs}
    return [replace(row, compared=verdicts.get(row.trial)) for row in rows]


def draw_conclusion(
    rows: Sequence[TrialFigures], repeats: int, metric: Metric, folds: int = 0
) -> list[str]:
    """Return sentences that say what the results show.

    Args:
        rows: Trials as `tabulate` returns them.
        repeats: Number of seeds of each trial.
        metric: Metric of the sweep.
        folds: Number of folds of each trial; 0 without cross-validation.
    """
    finished = [row for row in rows if row.status == "done"]
    sentences = [metric.about] if finished else []
    if finished and len(rows) > 1 and metric.name != SPEED:
        sentences.append(
            f"the best of {readable.format_count(len(finished), 'trial')} was chosen by this "
            "figure, which is therefore optimistic: images that no trial has seen tell more"
        )
    if len(finished) > 1 and folds:
        sentences.append("differences are not tested: runs of different folds share images")
    elif len(finished) > 1 and repeats == 1:
        sentences.append(f"{NO_DIFFERENCE}: that takes several seeds, type repeats=3")
    elif len(finished) > 1:
        worse = sum(row.compared == "worse" for row in finished)
        few = ""
        if repeats < 5:
            few = f"; {repeats} seeds show only large differences"
        sentences.append(
            f"trial {finished[0].trial} is shown to be better than {worse} of {len(finished) - 1} "
            f"others{few}"
        )
    failed = sum(row.status == "failed" for row in rows)
    if failed:
        sentences.append(f"{readable.format_count(failed, 'trial')} failed")
    return sentences


def write_tables(folder: Path, report: Json, metric: Metric) -> None:
    """Write sweep.json, sweep.csv and sweep.md, with a row for each trial, the best one first."""
    keys = report["keys"]
    figures = ("status", "value", "std", "seconds", "compared", "error", "exit_code")
    rows = [["trial", *keys, *figures, "folder"]]
    for row in report["trials"]:
        cells = {**row["values"], **row}
        values = [cells[key] for key in (*keys, *figures)]
        rows.append([row["trial"], *values, " ".join(row["folders"])])
    more = []
    if report["best"]:
        more = [f"Best:\n\n    {shlex.join(report['best'])}"]
    more.append(reports.describe_versions(report["versions"]))
    title = f"{report['recipe']}: {len(report['trials'])} trials"
    best = [0] if report["best"] else []
    page = reports.as_markdown(
        title, report["command"], build_cells(report, metric), best, report["conclusion"], *more
    )
    reports.write_tables(folder, "sweep", report, page, rows)


def describe_runs(report: Json) -> str:
    """Describe the runs of each trial, as in "5 folds x 3 seeds"; "" for a single run."""
    counts = []
    if report["folds"]:
        counts.append(f"{len(report['folds'])} folds")
    if report["repeats"] > 1:
        counts.append(f"{report['repeats']} seeds")
    return " x ".join(counts)


def build_cells(report: Json, metric: Metric) -> list[list[str]]:
    """Return the cells of the table as text, the header row first."""
    compared = ""
    if any(row["compared"] for row in report["trials"]):
        compared = "compared"
    figure = metric.name
    if runs := describe_runs(report):
        figure += f" +- std of {runs}"
    table = [["trial", *report["keys"], figure, compared, "time", "note"]]
    for row in report["trials"]:
        value = metric.text(row["value"])
        took = readable.format_duration(row["seconds"] or None)
        if row["std"] is not None:
            value += f" +- {metric.text(row['std']).removesuffix('%')}"
        note = ""
        if row["error"]:
            note = f"exit {row['exit_code']}: {row['error']}"
        elif row["status"] != "done":
            note = "not done"
        values = [row["values"][key] for key in report["keys"]]
        table.append([str(row["trial"]), *values, value, row["compared"] or "", took, note])
    return table


def as_text(report: Json, metric: Metric) -> str:
    """Return the table for a terminal, with the best row in bold."""
    right = {0, len(report["keys"]) + 3}
    styles = {0: BOLD} if report["best"] else {}
    rows = build_cells(report, metric)
    return reports.as_text(rows, right, styles, report["conclusion"], reports.SHOWN)


def draw(folder: Path, report: Json, dimensions: Sequence[Dimension]) -> list[Path]:
    """Draw sweep.png, and return its path in a list.

    Return an empty list if no trial is finished, or no key except data.fold varies.

    There is a panel for each key with the metric of all trials, and a ring marks the best trial.
    The values of a list are evenly spaced, in the order of the list. The values of a range are on a
    linear or logarithmic scale.
    """
    finished = [row for row in report["trials"] if row["status"] == "done"]
    count = len(dimensions)
    if not finished or not count:
        return []
    scale = 100.0 if is_fraction(report["metric"]) else 1.0
    runs = describe_runs(report)
    figure, panels = plots.create_figure(max(8.0, 3.6 * count), 4.4, count)
    y = [scale * (row["value"] or 0.0) for row in finished]
    std = None
    if runs:
        std = [scale * (row["std"] or 0.0) for row in finished]
    for axes, part in zip(panels, dimensions, strict=True):
        values = [row["values"][part.key] for row in finished]
        position_of = float if part.ends else part.values.index
        x = [position_of(value) for value in values]
        colour = plots.COLOURS[0]
        axes.errorbar(x, y, yerr=std, color=colour, fmt="o", capsize=4)
        if count == 1 and not part.ends:
            points = sorted(zip(x, y, strict=True))
            axes.plot(*zip(*points, strict=True), color=colour)
        axes.plot(
            x[:1],
            y[:1],
            "o",
            color=plots.COLOURS[3],
            markersize=15,
            markeredgewidth=2,
            fillstyle="none",
        )
        axes.set_xlabel(part.key)
        if part.log:
            axes.set_xscale("log")
        if not part.ends:
            axes.set_xticks(range(len(part.values)), part.values)
    label = report["metric"]
    if scale > 1:
        label += ", %"
    panels[0].set_ylabel(label)
    title = f"{report['recipe']}: {len(finished)} of {len(report['trials'])} trials"
    if runs:
        title += f"; mean and standard deviation of {runs}"
    figure.suptitle(title, color=plots.INK, fontsize=11)
    plots.save_picture(figure, folder / "sweep.png")
    return [folder / "sweep.png"]

"""The results of a sweep: a row a trial, best first, and which claims about the best hold. `sweep.json` holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from trainer.commands.compare.ranking import NO_DIFFERENCE
from trainer.commands.sweep.sources import TrialOutcome
from trainer.commands.sweep.space import SweepTrial
from trainer.commands.trials.significance import ERROR, differences, mean_and_std
from trainer.telemetry import readable

Status = Literal["done", "ended early", "failed", "not done"]
MOST = 8  # trials that a sentence lists
ORDER: tuple[Status, ...] = ("done", "ended early", "not done", "failed")


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

    def to_dict(self) -> dict[str, Any]:
        """As sweep.json has it."""
        return asdict(self)


def tabulate(
    trials: Sequence[SweepTrial],
    outcomes: Mapping[int, Mapping[int, TrialOutcome]],
    folders: Mapping[int, Sequence[str]],
    repeats: int,
    metric: Metric,
) -> list[TrialFigures]:
    """The rows, best first, then those that ended early, are not done, or failed; `outcomes` are by trial and seed."""
    rows = [_row(trial, outcomes.get(trial.number, {}), folders.get(trial.number, ()), repeats) for trial in trials]
    sign = -1 if metric.larger_is_better else 1
    rows.sort(key=lambda row: (ORDER.index(row.status), math.inf if row.value is None else sign * row.value, row.trial))
    images = min((outcome.images for runs in outcomes.values() for outcome in runs.values()), default=0)
    return _compared(rows, metric, images)


def _row(trial: SweepTrial, outcomes: Mapping[int, TrialOutcome], folders: Sequence[str], repeats: int) -> TrialFigures:
    failed = next((outcome for outcome in outcomes.values() if outcome.error is not None), None)
    runs = {seed: outcome.value for seed, outcome in outcomes.items() if outcome.value is not None and not failed}
    early = any(outcome.early for outcome in outcomes.values())
    mean, std = mean_and_std(list(runs.values())) if runs else (None, None)
    status: Status = "failed" if failed else "ended early" if early else "done" if len(runs) >= repeats else "not done"
    return TrialFigures(
        trial=trial.number,
        values=dict(trial.values),
        status=status,
        value=mean,
        std=std if len(runs) > 1 else None,
        runs=runs,
        epochs=sum(outcome.epochs for outcome in outcomes.values()),
        seconds=sum(outcome.seconds for outcome in outcomes.values()),
        compared=None,
        error=failed.error if failed else None,
        exit_code=failed.code if failed else 0,
        folders=list(folders),
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
    for status in ("ended early", "failed"):
        if count := sum(row.status == status for row in rows):
            sentences.append(f"{readable.counted(count, 'trial')} {status}")
    return sentences


def _listed(rows: Sequence[TrialFigures]) -> str:
    """Rows by their trials' numbers, or how many they are."""
    numbers = sorted(row.trial for row in rows)
    if len(numbers) > MOST:
        return f"{len(numbers)} others"
    return f"trial{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"

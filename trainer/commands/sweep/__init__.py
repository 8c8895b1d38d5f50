"""`python -m trainer sweep`: which values of a recipe's keys train best, every trial an ordinary run.

Lists are tried in every combination, ranges are sampled by Optuna. The metric is of the held-out images, or images/s;
what is done is kept, and the same words go on after a stop.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from trainer import tasks
from trainer.commands.runs.run_status import finite
from trainer.commands.sweep import results
from trainer.commands.sweep.results import Metric, TrialFigures
from trainer.commands.sweep.space import OWN_WORDS, SearchSpace
from trainer.commands.trials import engine
from trainer.commands.trials.engine import AGAIN, TrialFailed, TrialOutcome, TrialRun
from trainer.commands.trials.report import TrialsProgress, tell_files
from trainer.data.downloads import PUBLISHED
from trainer.errors import RecipeError
from trainer.processes.interrupts import SAVING
from trainer.processes.rank import place
from trainer.processes.terminal import say
from trainer.recipe import shipped_recipes
from trainer.recipe.recipe_files import positive_integer, split_words
from trainer.saving.files import usable_json
from trainer.telemetry import readable
from trainer.training.reporting import versions

FILE = "sweep.json"
FREE = (  # keys and sections that a sweep may change when it goes on, for they change no trial's result
    "devices", "threads", "timeout", "grace", "save", "logging", "predict", "output", "resume",
    "data.workers", "data.download", "data.cache_dir",
)  # fmt: skip


def command(words: Sequence[str]) -> int:
    """`python -m trainer sweep words...`: 0, or the exit code of the first trial that failed where none ended well.

    Raises:
        RecipeError: words that no trial could run with, before anything starts.
        SetupError: Optuna is not installed and a range is given, or the folder cannot be written.
        FolderInUseError: output= holds something else.
        Interrupted, Preempted: stopped; what was done is kept.
    """
    own, rest = split_words(words, OWN_WORDS)
    if place().launched:
        raise RecipeError("sweep starts its processes itself: type python -m trainer sweep ... without torchrun")
    if "recipe" not in own:
        raise RecipeError(f"sweep needs recipe=, as in recipe=digits; shipped: {', '.join(shipped_recipes())}")
    if own.get("resume", "auto") != "auto":
        raise RecipeError(f"resume={own['resume']} must be auto, and may be left out: the same words continue it")
    if own.get("metric", "speed") != "speed":
        raise RecipeError(f"metric={own['metric']} must be speed; left out, it is the task's own, as top1")
    repeats, trials = (positive_integer(key, own.get(key)) for key in ("repeats", "trials"))
    speeds = "metric" in own
    space = SearchSpace(own["recipe"], rest, repeats or 1, trials, own.get("nproc"), own.get("plugin"), speeds)
    line = shlex.join(["python", "-m", "trainer", "sweep", *(word for word in words if word != "resume=auto")])
    stem = Path(f"runs/sweep-{re.sub(r'[^A-Za-z0-9_.-]+', '-', space.base.name)}")
    free = () if space.speed else FREE
    with engine.claim(own.get("output"), stem, "sweep", FILE, space.asked(), line, free) as folder:
        report = Sweeping(folder, space, line).run()
    failed = [row["exit_code"] for row in report["trials"] if row["exit_code"]]
    return 0 if report["best"] else failed[0] if failed else RecipeError.code


class Sweeping:
    """One sweep under way; `command` is what one types to go on."""

    def __init__(self, folder: Path, space: SearchSpace, command: str) -> None:
        self.folder, self.space, self.command, self.begun = folder, space, command, time.monotonic()
        self.metric = metric_of(space)
        self.engine = engine.TrialEngine(folder, space.places(), space.base.grace + SAVING)
        kept = sorted(usable_json(folder / FILE).get("trials", []), key=lambda row: row["trial"])  # of those sampled
        drawn = space.combinations() if space.trials is None else [row["values"] for row in kept]
        self.trials = [TrialFigures(number, values) for number, values in enumerate(drawn, 1)]
        self.images: list[int] = []  # that were held out, of each run
        self.progress = TrialsProgress(space.count() * space.repeats)

    def run(self) -> dict[str, Any]:
        """All trials; the table and the winning command last."""
        space = self.space
        how = ", ".join(map(str, space.dimensions)) + ", sampled by Optuna" * (space.trials is not None)
        say(f"sweeping {space.base.name}: {readable.counted(space.count(), 'trial')}, {how}")
        say(f"  {readable.counted(self.progress.total, 'run')}, {len(self.engine.places)} at a time:")
        for words in dict.fromkeys(map(" ".join, self.engine.places)):
            say(f"    {words}")
        say(f"  in {self.folder}; if it is stopped, {AGAIN}")
        status = "interrupted"
        try:
            self.engine.run(self._trials(), self._told)
            status = "completed"
        finally:
            report = self._write(status)
        print("\n" + results.as_text(report, self.metric), flush=True)
        tell_files(self.folder, "sweep", self.folder, partial(results.draw, self.folder, report, space.dimensions))
        if report["best"]:
            best = report["trials"][0]
            figure = f"{self.metric.name} {self.metric.text(best['value'])}"
            say(f"  best     trial {best['trial']}, {figure}, in {best['folders'][0]}; to train it again:")
            say(shlex.join(report["best"]))
        return report

    def _trials(self) -> Iterator[TrialRun]:
        """Without those whose trial has failed."""
        for row, repeat in self._in_order():
            seed = self.space.base.seed + repeat
            if row.error is None:
                words = [*self.space.typed(row.values), *[f"seed={seed}"] * bool(repeat)]
                words += ["save.every_epochs=null"] * self.space.speed
                name = row.name(seed if repeat else None)
                yield TrialRun(name, words, read=self._read, resumes=not self.space.speed, key=(row, seed))

    def _in_order(self) -> Iterator[tuple[TrialFigures, int]]:
        """Every combination with the first seed, then with the next: what is stopped early tells most. What is sampled
        has all its seeds at once, since the next depends on it.
        """
        space = self.space
        if space.trials is None:
            yield from ((row, repeat) for repeat in range(space.repeats) for row in self.trials)
            return
        for position in range(max(space.trials, len(self.trials))):
            if position == len(self.trials):
                ended = [(row.values, row.value if row.status == "done" else None) for row in self.trials]
                values = space.sampled(ended, self.metric.larger_is_better)
                self.trials.append(TrialFigures(position + 1, values))
                self._write("running")  # what was drawn is kept before it runs
            yield from ((self.trials[position], repeat) for repeat in range(space.repeats))

    def _read(self, path: Path, result: dict[str, Any]) -> float:
        if self.space.speed:
            rate = finite((result["throughput"] or {}).get("samples_per_sec"))
            value = rate and engine.speed(engine.steps_of(path), rate)
            engine.drop_weights(path)
        else:
            value = finite(result.get(f"best_{self.metric.name}"))
        if value is None:
            why = "it was too short for a speed" if self.space.speed else "no epoch was evaluated"
            line = f"{why}, so there is no {self.metric.name}: raise max_steps, or give data.root"
            raise TrialFailed(line, RecipeError.code)
        return value

    def _told(self, trial: TrialRun, outcome: TrialOutcome) -> None:
        """A run has ended, or was done before."""
        row, seed = trial.key
        path = self.engine.path(trial)
        result = usable_json(path / "result.json")
        self.images.append(int(finite((result.get("data") or {}).get("val_samples")) or 0))
        row.add(seed, outcome, finite(result.get("seconds")) or 0.0, path, self.space.repeats)
        what = " ".join(row.words) + f" seed={seed}" * (self.space.repeats > 1)
        self.progress.tell(what, outcome, f"{self.metric.name} {self.metric.text(outcome.value)}")
        if outcome.seconds is not None:
            self._write("running")

    def _write(self, status: str) -> dict[str, Any]:
        """The tables, with what there is so far; returns what sweep.json holds, whose keys are stable."""
        space = self.space
        rows = results.tabulate(self.trials, self.metric, min(self.images, default=0))
        report = {
            "recipe": space.base.name,
            "status": status,
            "command": self.command,
            "asked": space.asked(),
            "keys": [part.key for part in space.dimensions],
            "repeats": space.repeats,
            "metric": self.metric.name,
            "trials": [asdict(row) for row in rows],
            "conclusion": results.conclusion(rows, space.repeats, self.metric),
            "best": None,
            "seconds": time.monotonic() - self.begun,
            "versions": versions(),
        }
        if rows and rows[0].status == "done":
            report["best"] = ["python", "-m", "trainer", *space.typed(rows[0].values)]
        results.write_tables(self.folder, report, self.metric)
        return report


def metric_of(space: SearchSpace) -> Metric:
    if space.speed:
        return Metric(results.SPEED, True, "images/s is the median over a run's windows, of runs one at a time")
    kind, data = tasks.kind(space.base), space.base.data
    published = f"torchvision's test images, for {data.name} has no validation images apart from them"
    images = published if data.name in PUBLISHED else "held-out images"
    return Metric(kind.metric, kind.larger_is_better, f"{kind.metric} is that of each run's best epoch, on {images}")

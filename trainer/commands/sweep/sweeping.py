"""One sweep: which runs there are, what is read from them, and the winning command."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from trainer import tasks
from trainer.commands.runs.run_status import finite
from trainer.commands.sweep import results, sweep_pictures
from trainer.commands.sweep.results import Metric, RunFigures, SweepReport
from trainer.commands.sweep.sampling import Sampler
from trainer.commands.sweep.space import Places, Range, SearchSpace, SweepTrial
from trainer.commands.trials.engine import AGAIN, TrialEngine, TrialFailed, TrialOutcome, TrialRun, claim
from trainer.commands.trials.report import progress, tell_files
from trainer.data.downloads import PUBLISHED
from trainer.errors import RecipeError
from trainer.processes.interrupts import SAVING
from trainer.processes.terminal import say
from trainer.saving.files import usable_json
from trainer.telemetry import readable
from trainer.training.reporting import versions

FILE = "sweep.json"
FREE = (  # keys and sections that a sweep may change when it goes on, for they change no trial's result
    "devices", "threads", "timeout", "grace", "save", "logging", "predict", "output", "resume",
    "data.workers", "data.download", "data.cache_dir",
)  # fmt: skip


def sweep(space: SearchSpace, output: str | None) -> int:
    """The exit code: 0 where a trial ended well, else that of the first that failed. Raises as `claim`."""
    places, command = Places.of(space), _command(space, output)
    stem = Path(f"runs/sweep-{re.sub(r'[^A-Za-z0-9_.-]+', '-', space.name)}")
    with claim(output, stem, "sweep", FILE, space.asked(), command, FREE) as folder:
        report = Sweeping(folder, space, places, command).run()
    failed = [row.exit_code for row in report.trials if row.exit_code]
    return 0 if report.done else failed[0] if failed else RecipeError.code


def _command(space: SearchSpace, output: str | None) -> str:
    words = [f"recipe={space.source}", *space.typed_words, *space.launch_words]
    words += [f"trials={space.trials}"] * (space.trials is not None)
    words += [f"repeats={space.repeats}"] * (space.repeats > 1)
    return shlex.join(["python", "-m", "trainer", "sweep", *words, *([f"output={output}"] if output else [])])


class Sweeping:
    """One sweep under way."""

    def __init__(self, folder: Path, space: SearchSpace, places: Places, command: str) -> None:
        self.folder, self.space, self.places, self.command = folder, space, places, command
        kind, data = tasks.kind(space.base), space.base.data
        published = f"torchvision's test images, for {data.name} has no validation images apart from them"
        images = published if data.name in PUBLISHED else "held-out images"
        self.metric = Metric(kind.metric, kind.larger_is_better, images)
        sampled = space.trials is not None
        self.sampler = Sampler(space, folder, kind.larger_is_better) if sampled else None
        where = [places.words(place) for place in range(len(places.devices))]
        self.engine = TrialEngine(folder, where, space.base.grace + SAVING)
        self.trials: list[SweepTrial] = [] if sampled else space.combinations()
        self.runs: dict[int, dict[int, RunFigures]] = {}  # by trial and seed
        self.total, self.done, self.begun = space.count() * space.repeats, 0, time.monotonic()

    def run(self) -> SweepReport:
        """All trials; the table and the winning command last."""
        self._announce()
        status = "interrupted"
        try:
            self.engine.run(self._trials(), self._told)
            status = "completed"
        finally:
            report = self._write(status)
        print("\n" + results.as_text(report, self.metric), flush=True)
        tell_files(
            self.folder, "sweep", self.folder, lambda: sweep_pictures.draw(self.folder, report, self.space.dimensions)
        )
        if report.best:
            best = report.done[0]
            figure = f"{self.metric.name} {self.metric.text(best.value)}"
            say(f"  best     trial {best.trial}, {figure}, in {best.folders[0]}; to train it again:")
            say(shlex.join(report.best))
        return report

    def _announce(self) -> None:
        space = self.space
        how = " x ".join(f"{len(part.ends())} {part.key}" for part in space.dimensions)
        if self.sampler is not None:
            how = "sampled by Optuna: " + ", ".join(map(str, space.dimensions))
        say(f"sweeping {space.name}: {readable.counted(space.count(), 'trial')}, {how}")
        seeds = f"{space.repeats} seeds each, " if space.repeats > 1 else ""
        say(f"  {seeds}{readable.counted(self.total, 'run')}, {self.places}")
        say(f"  {self.metric.name} on {self.metric.images}")
        say(f"  in {self.folder}; if it is stopped, {AGAIN}")

    def _trials(self) -> Iterator[TrialRun]:
        """Without those whose trial has failed."""
        for trial, repeat in self._in_order():
            seed = self.space.seeds[repeat]
            if all(run.error is None for run in self.runs.get(trial.number, {}).values()):
                name, words = trial.folder(seed if repeat else None), self.space.typed(trial.values)
                seeded = seed if repeat else None
                yield TrialRun(name, words, seeded, read=self._read, resumes=True, key=(trial, seed))

    def _in_order(self) -> Iterator[tuple[SweepTrial, int]]:
        """Every combination with the first seed, then with the next: what is stopped early tells most. What is sampled
        has all its seeds at once, since the next depends on it.
        """
        if self.sampler is None:
            yield from ((trial, repeat) for repeat in range(self.space.repeats) for trial in self.trials)
            return
        for trial in self.sampler.trials():
            self.trials.append(trial)
            yield from ((trial, repeat) for repeat in range(self.space.repeats))

    def _read(self, path: Path, result: dict[str, Any]) -> float:
        value = finite(result.get(f"best_{self.metric.name}"))
        if value is None:
            line = f"no epoch was evaluated, so there is no {self.metric.name}: raise max_steps, or give data.root"
            raise TrialFailed(line, RecipeError.code)
        return value

    def _told(self, trial: TrialRun, outcome: TrialOutcome) -> None:
        """A run has ended, or was done before."""
        swept, seed = trial.key
        result = usable_json(self.engine.path(trial) / "result.json")
        epochs, images = _count(result.get("epochs")), _count((result.get("data") or {}).get("val_samples"))
        folder, seconds = str(self.engine.path(trial)), finite(result.get("seconds")) or 0.0
        runs = self.runs.setdefault(swept.number, {})
        runs[seed] = RunFigures(outcome.value, epochs, seconds, images, folder, outcome.error, outcome.code)
        if self.sampler is not None and (outcome.error is not None or len(runs) == self.space.repeats):
            values = [run.value for run in runs.values() if run.value is not None and run.error is None]
            self.sampler.ended(swept.number, fmean(values) if len(values) == self.space.repeats else None)
        self.done += 1
        if outcome.seconds is None:
            return
        news = f"{self.metric.name} {self.metric.text(outcome.value)}"
        news = news if outcome.error is None else f"exit {outcome.code}: {outcome.error}"
        name = swept.name + f" seed={seed}" * (self.space.repeats > 1)
        left = self.engine.left([("next", 0.0)] * (self.total - self.done))
        progress(self.done, self.total, name, news, outcome.seconds, left)
        self._write("running")

    def _write(self, status: str) -> SweepReport:
        """The tables, with what there is so far."""
        space = self.space
        rows = results.tabulate(self.trials, self.runs, space.repeats, self.metric)
        best = next((row for row in rows if row.status == "done"), None)
        report = SweepReport(
            recipe=space.name,
            status=status,
            command=self.command,
            asked=space.asked(),
            keys=space.keys,
            logarithmic=[part.key for part in space.dimensions if isinstance(part, Range) and part.log],
            repeats=space.repeats,
            metric=self.metric.name,
            larger_is_better=self.metric.larger_is_better,
            images=self.metric.images,
            trials=rows,
            conclusion=results.conclusion(rows, space.repeats, self.metric),
            best=["python", "-m", "trainer", *space.typed(best.values)] if best else None,
            seconds=time.monotonic() - self.begun,
            versions=versions(),
        )
        results.write_tables(self.folder, report, self.metric)
        return report


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0

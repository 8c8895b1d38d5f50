"""One sweep, from its folder and its checks to its picture and the winning command."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer import recipe as recipes
from trainer import tasks
from trainer.commands.sweep import sweep_pictures, sweep_table
from trainer.commands.sweep.results import Metric, SweepReport, conclusion, tabulate
from trainer.commands.sweep.sources import Combinations, Sampled, Source, TrialOutcome, TrialRun
from trainer.commands.sweep.space import Places, SearchSpace
from trainer.commands.sweep.trial_runner import TrialRunner
from trainer.data.downloads import PUBLISHED
from trainer.errors import FolderInUseError, RecipeError
from trainer.processes.terminal import say
from trainer.recipe.loading import load_stored
from trainer.recipe.search_space import Range
from trainer.saving.files import usable_json, write_atomically
from trainer.saving.locks import folder_of
from trainer.telemetry import readable
from trainer.training.reporting import versions

FILE = "sweep.json"
FREE = {  # keys and sections that a sweep may change when it goes on, for they change no trial's result
    "devices", "threads", "timeout", "grace", "save", "logging", "predict", "output", "resume",
    "data.workers", "data.download", "data.cache_dir",
}  # fmt: skip


def sweep(space: SearchSpace, output: str | None) -> int:
    """The exit code: 0 where a trial ended well, else that of the first that failed.

    Raises:
        FolderInUseError: the folder holds another sweep, or something else.
        KeyboardInterrupt, Preempted: stopped; what was done is kept.
    """
    places = Places.of(space)
    with claim(output, space) as folder:
        report = Sweeping(folder, space, places, output).run()
    failed = [row.exit_code for row in report.trials if row.exit_code]
    return 0 if report.done else failed[0] if failed else RecipeError.code


@contextmanager
def claim(output: str | None, space: SearchSpace) -> Iterator[Path]:
    """The sweep's folder, held under a lock: `output`, or the first below runs that is free or holds this very sweep.
    Raises FolderInUseError, SetupError.
    """
    stem = f"runs/sweep-{re.sub(r'[^A-Za-z0-9_.-]+', '-', space.name)}"
    with folder_of(output, Path(stem), "sweep", lambda path: _other(path, space)) as path:
        if (what := _other(path, space)) is not None:
            raise FolderInUseError(f"{path} holds {what}choose another output=")
        begun = {**usable_json(path / FILE), "asked": space.asked(), "command": _command(space, output)}
        write_atomically(path / FILE, json.dumps(begun, indent=2) + "\n")
        yield path


def _other(path: Path, space: SearchSpace) -> str | None:
    """What else than this sweep the folder holds, and what continues that; None where it is free, or this sweep's."""
    previous = usable_json(path / FILE)
    before = previous.get("asked")
    if not isinstance(before, dict):
        used = path.is_dir() and any(name != ".lock" for name in os.listdir(path))
        return "something other than a sweep: " if used else None
    changed = [key for key, value in space.asked().items() if key != "settings" and before.get(key) != value]
    changed += _changed_settings(before.get("settings"), space)
    if not changed:
        return None
    return f"a sweep with other {', '.join(changed[:3])}: to go on with that one type {previous.get('command')}; or "


def _changed_settings(before: Any, space: SearchSpace) -> list[str]:
    """Keys of the recipe that differ and may change a result; those of an older version have their defaults."""
    try:
        old, new = (recipes.flatten(recipe.to_dict()) for recipe in (load_stored(before, FILE), space.base))
    except RecipeError:
        return ["settings"]
    return [key for key in new if old[key] != new[key] and not {key, key.partition(".")[0]} & FREE]


def _command(space: SearchSpace, output: str | None) -> str:
    words = [f"recipe={space.source}", *space.typed_words, *space.launch_words]
    words += [f"trials={space.trials}"] * (space.trials is not None)
    words += [f"repeats={space.repeats}"] * (space.repeats > 1)
    return shlex.join(["python", "-m", "trainer", "sweep", *words, *([f"output={output}"] if output else [])])


def metric_of(space: SearchSpace) -> Metric:
    """The metric of the recipe's task, and of which images."""
    kind, data = tasks.kind(space.base), space.base.data
    images = "held-out images"
    if data.name in PUBLISHED:
        images = f"torchvision's test images, for {data.name} has no validation images apart from them"
    return Metric(kind.metric, kind.larger_is_better, images)


class Sweeping:
    """One sweep under way."""

    def __init__(self, folder: Path, space: SearchSpace, places: Places, output: str | None) -> None:
        self.folder, self.space, self.places = folder, space, places
        self.metric = metric_of(space)
        self.command = _command(space, output)
        sampled = space.trials is not None
        larger = self.metric.larger_is_better
        self.source: Source = Sampled(space, folder, larger) if sampled else Combinations(space)
        self.runner = TrialRunner(folder, space, places, self.metric.name, watched=sampled)
        self.outcomes: dict[int, dict[int, TrialOutcome]] = {}
        self.folders: dict[int, list[str]] = {}
        self.done, self.kept, self.begun = 0, 0, time.monotonic()

    def run(self) -> SweepReport:
        """All trials; the table and the winning command last."""
        self._announce()
        status = "interrupted"
        try:
            self.runner.execute(self.source, self._told)
            status = "completed"
        finally:
            report = self._write(status)
        print("\n" + sweep_table.as_text(report, self.metric), flush=True)
        files = [f"{self.folder}/sweep.md", ".csv", ".json", *self._draw(report)]
        say(f"  tables   {', '.join(files)}")
        say(f"  watch    python -m tensorboard.main --logdir {shlex.quote(str(self.folder))}")
        if report.best:
            best = report.done[0]
            figure = f"{self.metric.name} {self.metric.text(best.value)}"
            say(f"  best     trial {best.trial}, {figure}, in {best.folders[0]}; to train it again:")
            say(shlex.join(report.best))
        return report

    def _announce(self) -> None:
        space, runs = self.space, self.space.count() * self.space.repeats
        how = " x ".join(f"{len(part.ends())} {part.key}" for part in space.dimensions)
        if space.trials is not None:
            how = "sampled by Optuna: " + ", ".join(map(str, space.dimensions))
        say(f"sweeping {space.name}: {readable.counted(space.count(), 'trial')}, {how}")
        seeds = f"{space.repeats} seeds each, " if space.repeats > 1 else ""
        say(f"  {seeds}{readable.counted(runs, 'run')}, {self.places}")
        if space.trials is not None:
            say("  a trial below the median of the others at the same epoch is ended early")
        say(f"  {self.metric.name} on {self.metric.images}")
        say(f"  in {self.folder}; if it is stopped, the same words continue it")

    def _told(self, run: TrialRun, outcome: TrialOutcome, seconds: float | None) -> None:
        """A run has ended, or was done before."""
        seed = self.space.seeds[run.repeat]
        self.outcomes.setdefault(run.trial.number, {})[seed] = outcome
        self.folders.setdefault(run.trial.number, []).append(str(self.runner.path(run)))
        self.done += 1
        if seconds is None:
            self.kept += 1
            return
        news = self.metric.name + " " + self.metric.text(outcome.value) if outcome.value is not None else "no figure"
        if outcome.error is not None:
            news = f"exit {outcome.code}: {outcome.error}"
        elif outcome.early:
            news = f"ended early after {readable.counted(outcome.epochs, 'epoch')}, {news}"
        total, name = self.space.count() * self.space.repeats, run.trial.name
        name += f" seed={seed}" if self.space.repeats > 1 else ""
        say(f"[{self.done}/{total}] {name}: {news}, {seconds:.0f} s{self._left(total)}")
        self._write("running")

    def _left(self, total: int) -> str:
        """How long the rest takes, where it is worth a word."""
        fresh, left = self.done - self.kept, total - self.done
        seconds = (time.monotonic() - self.begun) / fresh * left
        return f"; about {readable.duration(seconds)} to go" if left and seconds > 60 else ""

    def _write(self, status: str) -> SweepReport:
        """The tables, with what there is so far."""
        space = self.space
        rows = tabulate(self.source.trials, self.outcomes, self.folders, space.repeats, self.metric)
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
            conclusion=conclusion(rows, space.repeats, self.metric),
            best=["python", "-m", "trainer", *space.typed(best.values)] if best else None,
            seconds=time.monotonic() - self.begun,
            versions=versions(),
        )
        sweep_table.write_tables(self.folder, report, self.metric)
        return report

    def _draw(self, report: SweepReport) -> list[str]:
        """A picture must not hide what came before it."""
        try:
            return [path.name for path in sweep_pictures.draw(self.folder, report, self.space.dimensions)]
        except Exception as error:
            say(f"  no picture: {type(error).__name__}: {' '.join(str(error).split())}")
            return []

"""`python -m trainer sweep`: find the values of a recipe's keys that train best.

Every trial is an ordinary run. Lists are tried in every combination. If any key has a range, Optuna
samples the values of all swept keys instead. The metric is that of the task on the validation split
or, with metric=speed, images/s. Finished runs are kept, and the same command resumes a stopped
sweep.
"""

import re
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from trainer import tasks
from trainer.commands.runs.run_status import as_finite_number
from trainer.commands.sweep import results
from trainer.commands.sweep.results import Metric, TrialFigures
from trainer.commands.sweep.space import OWN_WORDS, SearchSpace, TrialSample
from trainer.commands.trials.engine import (
    AGAIN,
    TrialEngine,
    TrialFailed,
    TrialOutcome,
    TrialRun,
    claim_folder,
    compute_speed,
    drop_weights,
    read_steps_file,
)
from trainer.commands.trials.report import TrialsProgress, report_files
from trainer.data.downloads import PUBLISHED
from trainer.errors import RecipeError
from trainer.processes.interrupts import SAVE_SECONDS
from trainer.processes.rank import read_place
from trainer.processes.terminal import say
from trainer.recipe import parse_positive_integer, shipped_recipes, split_arguments
from trainer.saving.files import Json, read_json_or_empty
from trainer.telemetry.readable import format_count
from trainer.training.reporting import list_versions

FILE = "sweep.json"
# Keys and sections that may change when a sweep is resumed, because no metric of a task depends on
# them. With metric=speed, none of them may change.
FREE = (
    "devices",
    "threads",
    "timeout",
    "grace",
    "save",
    "logging",
    "predict",
    "output",
    "resume",
    "data.workers",
    "data.download",
    "data.cache_dir",
)


def command(words: Sequence[str]) -> int:
    """Run `python -m trainer sweep`.

    Returns:
        Exit code 0 if any trial succeeded, otherwise the exit code of the first failed trial.

    Raises:
        RecipeError: A trial could not run with these arguments; nothing has started.
        SetupError: A range needs Optuna, which is not installed, or the folder cannot be written.
        FolderInUseError: The folder of output= holds something else or a different sweep, or
            another process uses it.
        Interrupted, Preempted: The sweep was stopped; finished runs are kept.
    """
    own, rest = split_arguments(words, OWN_WORDS)
    if read_place().launched:
        raise RecipeError(
            "sweep starts its processes itself: type python -m trainer sweep ... without torchrun"
        )
    if "recipe" not in own:
        raise RecipeError(
            f"sweep needs recipe=, as in recipe=digits; shipped: {', '.join(shipped_recipes())}"
        )
    if own.get("resume", "auto") != "auto":
        raise RecipeError(
            f"resume={own['resume']} must be auto, and may be left out: the same command continues "
            "a sweep"
        )
    if own.get("metric", "speed") != "speed":
        raise RecipeError(
            f"metric={own['metric']} must be speed; left out, it is the task's own, as top1"
        )
    space = SearchSpace(
        own["recipe"],
        rest,
        parse_positive_integer("repeats", own.get("repeats")) or 1,
        parse_positive_integer("trials", own.get("trials")),
        own.get("nproc"),
        own.get("plugin"),
        speed="metric" in own,
    )
    arguments = [word for word in words if word != "resume=auto"]
    line = f"python -m trainer sweep {shlex.join(arguments)}"
    stem = Path(f"runs/sweep-{re.sub(r'[^A-Za-z0-9_.-]+', '-', space.base.name)}")
    free = () if space.speed else FREE
    output = own.get("output")
    with claim_folder(output, stem, "sweep", FILE, space.asked(), line, free) as folder:
        report = Sweeping(folder, space, line).run()
    if report["best"]:
        return 0
    exit_codes = (row["exit_code"] for row in report["trials"] if row["exit_code"])
    return next(exit_codes, RecipeError.code)


@dataclass(eq=False)
class Sweeping:
    """Sweep in progress.

    Attributes:
        folder: Directory of the results.
        space: Values to try.
        command: Command that resumes the sweep.
    """

    folder: Path
    space: SearchSpace
    command: str

    def __post_init__(self) -> None:
        self.start_time = time.monotonic()
        space = self.space
        self.metric = choose_metric(space)
        seconds_to_stop = space.base.grace + SAVE_SECONDS
        self.engine = TrialEngine(self.folder, space.places(), seconds_to_stop)
        if space.trials is None:
            choices = space.combinations()
        else:
            # A resumed sweep keeps the sampled values of its earlier trials.
            stored = read_json_or_empty(self.folder / FILE).get("trials", [])
            rows = sorted(stored, key=lambda row: row["trial"])
            choices = [row["values"] for row in rows]
        self.trials = [TrialFigures(number, values) for number, values in enumerate(choices, 1)]
        # Number of validation images of each run that has ended; 0 if result.json does not say it.
        self.images: list[int] = []
        self.samples = space.samples()
        self.progress = TrialsProgress(space.count() * len(self.samples))

    def run(self) -> Json:
        """Run all trials, print the table and the best command, and return the report."""
        space = self.space
        dimensions = ", ".join(space.swept.values())
        if space.trials is not None:
            dimensions += ", sampled by Optuna"
        say(f"sweeping {space.base.name}: {format_count(space.count(), 'trial')}, {dimensions}")
        say(f"  {format_count(self.progress.total, 'run')}, {len(self.engine.places)} at a time:")
        for arguments in dict.fromkeys(map(" ".join, self.engine.places)):
            say(f"    {arguments}")
        say(f"  in {self.folder}; if it is stopped, {AGAIN}")
        status = "interrupted"
        try:
            self.engine.run(self._trials(), self._note)
            status = "completed"
        finally:
            report = self._write(status)
        print("\n" + results.as_text(report, self.metric), flush=True)
        draw = partial(results.draw, self.folder, report, space.dimensions)
        report_files(self.folder, "sweep", self.folder, draw)
        if report["best"]:
            best = report["trials"][0]
            figure = (
                f"{self.metric.name} {self.metric.text(best['value'])}, in {best['folders'][0]}"
            )
            again = "without a fold" if space.folds else "again"
            say(f"  best     trial {best['trial']}, {figure}; to train it {again}:")
            say(shlex.join(report["best"]))
        return report

    def _trials(self) -> Iterator[TrialRun]:
        """Yield the runs in order, without those of a trial that has failed."""
        speed = self.space.speed
        for row, sample in self._in_order():
            if row.error is None:
                words = [*self.space.typed(row.values), *sample.words]
                if speed:
                    words.append("save.every_epochs=null")
                name = row.name(sample.words)
                key = (row, sample)
                yield TrialRun(name, words, read=self._read, resumes=not speed, key=key)

    def _in_order(self) -> Iterator[tuple[TrialFigures, TrialSample]]:
        """Yield the trial and the `TrialSample` of each run.

        If only lists vary, all combinations run with the first fold and seed, then all with the
        next, so that a sweep that is stopped early has compared as many combinations as possible.
        A sampled trial runs with all folds and seeds in a row, because the next sample depends on
        its result.
        """
        space = self.space
        trials = self.trials
        if space.trials is None:
            for sample in self.samples:
                for row in trials:
                    yield row, sample
            return
        for position in range(max(space.trials, len(trials))):
            if position == len(trials):
                ended = []
                for row in trials:
                    # Pass the sampler no mean of an incomplete trial: means over different folds
                    # or seeds cannot be compared.
                    value = row.value if row.status == "done" else None
                    ended.append((row.values, value))
                values = space.sampled(ended, self.metric.larger_is_better)
                trials.append(TrialFigures(position + 1, values))
                # The sample is stored before it runs, so that a resumed sweep runs it again.
                self._write("running")
            for sample in self.samples:
                yield trials[position], sample

    def _read(self, path: Path, result: Json) -> float:
        if self.space.speed:
            rate = as_finite_number((result["throughput"] or {}).get("samples_per_sec"))
            value = rate and compute_speed(read_steps_file(path), rate)
            drop_weights(path)
        else:
            value = as_finite_number(result.get(f"best_{self.metric.name}"))
        if value is None:
            reason = "no epoch was evaluated"
            if self.space.speed:
                reason = "it was too short for a speed"
            raise TrialFailed(
                f"{reason}, so there is no {self.metric.name}: raise max_steps, or give data.root",
                RecipeError.code,
            )
        return value

    def _note(self, trial: TrialRun, outcome: TrialOutcome) -> None:
        """Record the end of a run, now or in an earlier attempt of the sweep."""
        row, sample = trial.key
        path = self.engine.path(trial)
        result = read_json_or_empty(path / "result.json")
        data = result.get("data") or {}
        self.images.append(int(as_finite_number(data.get("val_samples")) or 0))
        seconds = as_finite_number(result.get("seconds")) or 0.0
        row.add(sample.label, outcome, seconds, path, len(self.samples))
        words = [*row.words, *sample.words]
        figure = f"{self.metric.name} {self.metric.text(outcome.value)}"
        self.progress.tell(" ".join(words), outcome, figure)
        if outcome.seconds is not None:
            self._write("running")

    def _write(self, status: str) -> Json:
        """Write the tables with the results so far, and return the content of sweep.json.

        The keys of sweep.json never change, because scripts read them.
        """
        space = self.space
        folds = len(space.folds)
        rows = results.tabulate(self.trials, self.metric, min(self.images, default=0), folds)
        report = {
            "recipe": space.base.name,
            "status": status,
            "command": self.command,
            "asked": space.asked(),
            "keys": [part.key for part in space.dimensions],
            "repeats": space.repeats,
            "folds": space.folds,
            "metric": self.metric.name,
            "trials": [asdict(row) for row in rows],
            "conclusion": results.draw_conclusion(rows, space.repeats, self.metric, folds),
            "best": None,
            "seconds": time.monotonic() - self.start_time,
            "versions": list_versions(),
        }
        if rows and rows[0].status == "done":
            report["best"] = ["python", "-m", "trainer", *space.typed(rows[0].values)]
        results.write_tables(self.folder, report, self.metric)
        return report


def choose_metric(space: SearchSpace) -> Metric:
    """Return the metric that ranks the trials."""
    if space.speed:
        about = "images/s is the median over a run's windows, of runs one at a time"
        return Metric(results.SPEED, True, about)
    kind = tasks.find_task_class(space.base)
    name = space.base.data.name
    images = "held-out images"
    if name in PUBLISHED and not space.folds and space.base.data.fold is None:
        images = f"torchvision's test images, for {name} has no validation images apart from them"
    metric, larger_is_better = kind.choose_best_metric(space.base)
    about = f"{metric} is that of each run's best epoch, on {images}"
    return Metric(metric, larger_is_better, about)

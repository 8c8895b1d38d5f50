"""Run one comparison: start the runs, read their results, and report at the end."""

import json
import math
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

from trainer.commands.compare import comparison_table, ranking
from trainer.commands.compare.entries import CHECK, ROUNDED, Entry
from trainer.commands.compare.ranking import EntryFigures, Length
from trainer.commands.trials import significance
from trainer.commands.trials.engine import (
    TrialEngine,
    TrialOutcome,
    TrialRun,
    compute_speed,
    drop_weights,
    merge_arguments,
    read_steps_file,
)
from trainer.commands.trials.report import (
    OtherProcesses,
    TrialsProgress,
    is_busy,
    read_machine,
    report_files,
    write_tables,
)
from trainer.launch import launching
from trainer.processes.terminal import say
from trainer.recipe import Recipe
from trainer.saving.files import Json, read_json_or_empty
from trainer.telemetry.readable import format_count, format_number

FILE = "compare.json"
# An empty file with this name marks a run during which other processes used the machine.
DISTURBED = "disturbed"
# A check trains this number of steps, and compares the loss of each with that of `single`. A run
# whose max_steps is smaller trains max_steps steps.
CHECKED_STEPS = 20
# Target duration in seconds of the measured part of a run, and the minimum and maximum number of
# its steps.
SECONDS = 4.0
FEWEST = 10
MOST = 1000
# Number of logged rows of a run: enough for a curve, and too few to slow the run.
POINTS = 20
QUIET = ["save.every_epochs=null"]
NEEDED = {
    "data",
    "batch_size",
    "step_time_s",
    "throughput",
    "seconds_in",
    "peak_memory_bytes",
    "devices",
    "versions",
}


@dataclass(eq=False)
class Comparison:
    """A comparison in progress.

    Attributes:
        folder: folder of the comparison.
        base: the recipe that all entries share.
        rows: the entries, in the order in which they run.
        asked: the arguments of `compare` by name, as compare.json stores them.
        recipe: the value of `recipe=` on the command line of a run.
    """

    folder: Path
    base: Recipe
    rows: list[Entry]
    asked: Json
    recipe: str

    def __post_init__(self) -> None:
        self.first = [f"recipe={self.recipe}"]
        if self.asked["plugin"]:
            self.first.append(f"plugin={self.asked['plugin']}")
        self.engine = TrialEngine(self.folder)
        # Unless the user has set the number of repeats, `_rounds` raises it as long as noise may
        # hide a difference of `significance.HIDDEN`.
        self.repeats: int = self.asked["repeats"] or significance.LOOKS[0]
        self.length: Length | None = None
        stored_length = read_json_or_empty(self.folder / FILE).get("length")
        if stored_length:
            self.length = Length(**stored_length)
        self.start_time = time.perf_counter()
        self.others = OtherProcesses()
        self.progress = TrialsProgress(len(self._runnable()) * (self.repeats + 1))

    def run(self) -> Json:
        """Run all checks and repeats, write the tables and the picture, and return the report."""
        status = "failed"
        try:
            say(
                f"comparing {self.base.name}: {len(self.rows)} entries x {self.repeats} repeats, "
                f"in {self.folder}"
            )
            for row in self.rows:
                size = f"{format_count(row.ranks, 'rank')} x {format_count(row.threads, 'thread')}"
                say(f"  {row.name}: {row.problem or size}")
            self.engine.run(self._trials(), self._record_outcome)
            status = "completed"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            report = self._write(status)
            print("\n" + comparison_table.as_text(report), flush=True)
            curves = self.folder / "tensorboard"
            draw = partial(comparison_table.draw, self.folder, report, curves / self.rows[0].slug)
            report_files(self.folder, "compare", curves, draw)
        return report

    def _runnable(self) -> list[Entry]:
        """Return the entries that can run on this machine and have not failed so far."""
        return [row for row in self.rows if row.problem is None]

    def _trials(self) -> Iterator[TrialRun]:
        """Yield the checks, then the repeats interleaved as A B C A B C.

        With interleaving, a machine that becomes slower for a while slows all entries alike.
        """
        checked = []
        for row in self._runnable():
            yield self._check(row, CHECK, [])
            result = row.results.get(CHECK)
            if result is None:
                continue
            checked.append(result)
            if row.recipe.traits.reference and not row.parts:
                # GPU kernels choose their order of summation by shape. A second check with smaller
                # micro-batches shows how much rounding alone changes the losses.
                micro_batches = 2 * result.get("accumulate", 1)
                if result["devices"][0].startswith("cuda"):
                    smaller = []
                    if row.recipe.batch_size % micro_batches == 0:
                        smaller = [f"accumulate={micro_batches}"]
                    yield self._check(row, ROUNDED, smaller)
        if not checked:
            return
        is_fixed = any(word.startswith(("epochs=", "max_steps=")) for word in self.asked["words"])
        if self.length is None:
            self.length = choose_length(self.base, checked, self.asked["steps"], is_fixed)
        self._write("running")
        more = ""
        if self.asked["repeats"] is None:
            more = ", or more if a difference could stay hidden"
        say(f"{self.length.steps} steps per run, {self.repeats} runs each{more}")
        for repeat in self._rounds():
            for row in self._runnable():
                # The user's own arguments for length and logging take precedence.
                words = merge_arguments([*QUIET, *self.length.words()], row.words)
                yield self._trial(row, repeat, words, {})
            self._write("running")

    def _check(self, row: Entry, repeat: int, more: Sequence[str]) -> TrialRun:
        """Build a run of the first steps that logs every loss.

        The losses show whether the entry computes what `single` computes. The speed determines the
        length of the timed runs.
        """
        recipe = row.recipe
        words = [
            *QUIET,
            f"max_steps={min(CHECKED_STEPS, recipe.max_steps or CHECKED_STEPS)}",
            "logging.every_steps=1",
            "logging.tensorboard=false",
            "logging.verdict=false",
            *more,
        ]
        # Rounding to tf32 would hide a real difference of losses, so the check runs in fp32.
        if recipe.precision == "tf32":
            words.append("precision=fp32")
        return self._trial(row, repeat, merge_arguments(row.words, words), {launching.EXACT: "1"})

    def _trial(
        self, row: Entry, repeat: int, words: Sequence[str], variables: Mapping[str, str]
    ) -> TrialRun:
        name = f"runs/{row.slug}/{repeat}"
        read = partial(self._read, repeat)
        # Start to measure the CPU time of other processes during this run. One meter is enough: the
        # engine has one slot, starts this run now, and asks for the next run only when this one has
        # ended.
        self.meanwhile = OtherProcesses()
        return TrialRun(name, [*self.first, *words], variables, read, key=(row, repeat))

    def _read(self, repeat: int, path: Path, result: Json) -> Json:
        """Delete the weights of a run, move its curves, and return `result` unchanged.

        The curves of all repeats look alike. So the curves of the first repeat are moved to a
        folder of the entry, and all others are deleted.

        Raises:
            KeyError: the result cannot be used; see `TrialRun.read`.
        """
        if not result.keys() >= NEEDED:
            raise KeyError("result.json lacks keys that compare needs")
        if (path / DISTURBED).exists():
            raise KeyError("other processes disturbed this run")
        drop_weights(path)
        event_files = sorted(path.glob("events.out.tfevents.*"))
        curves = self.folder / "tensorboard" / path.parent.name
        if repeat != 1:
            for event_file in event_files:
                event_file.unlink()
        elif event_files:
            # Delete the curves of an earlier attempt at this run, which TensorBoard would show as
            # well.
            shutil.rmtree(curves, ignore_errors=True)
            curves.mkdir(parents=True)
            for event_file in event_files:
                event_file.replace(curves / event_file.name)
        return result

    def _record_outcome(self, trial: TrialRun, outcome: TrialOutcome) -> None:
        """Store the results of a run, and print a line about it."""
        row, repeat = trial.key
        steps = []
        if outcome.error is None:
            steps = read_steps_file(self.engine.path(trial))
        losses = []
        if repeat in (CHECK, ROUNDED):
            losses = [float(step["train_loss"]) for step in steps]
        if repeat == ROUNDED:
            # If this run failed, the list is empty, and the tolerance allows for no rounding beyond
            # `ranking.TOLERANCE`, as on the CPU.
            row.rounded = losses
            return
        news = "done"
        if outcome.error is not None:
            row.problem = outcome.error
            self.progress.total -= self.repeats - repeat
        else:
            result = row.results[repeat] = outcome.value
            if repeat == CHECK:
                row.losses = losses
            elif result["throughput"]:
                rate = compute_speed(steps, result["throughput"]["samples_per_sec"])
                row.speeds[repeat] = rate * compute_step_fraction(result)
                news = f"{format_number(row.speeds[repeat])} images/s"
                # A run that an earlier `compare` in this folder completed has no duration. That run
                # was undisturbed, because `_read` rejects disturbed runs.
                if outcome.seconds is not None and is_busy(self.meanwhile.cores()):
                    row.disturbed.add(repeat)
                    (self.engine.path(trial) / DISTURBED).touch()
                    news += ", disturbed by other processes"
        what = f"repeat {repeat}" if repeat else "check of the losses"
        self.progress.tell(f"{row.name}, {what}", outcome, news)

    def _rounds(self) -> Iterator[int]:
        """Yield the numbers of the repeats.

        If the user has not set `repeats`, more repeats follow as long as noise may hide a
        difference of `significance.HIDDEN`.
        """
        yield from range(1, self.repeats + 1)
        if self.asked["repeats"]:
            return
        for repeats in significance.LOOKS[1:]:
            table, pairs = self._tabulate()
            unclear = significance.unclear(ranking.select_sound(table, pairs))
            if not unclear:
                return
            say(
                f"a difference of {significance.HIDDEN:.0%} may hide in the spread, as between "
                f"{unclear[0].second} and {unclear[0].first}: more repeats"
            )
            previous = self.repeats
            self.repeats = repeats
            self.progress.total += (repeats - previous) * len(self._runnable())
            yield from range(previous + 1, repeats + 1)

    def _tabulate(self) -> tuple[list[EntryFigures], list[significance.Difference]]:
        # The allowed probability of an error is divided among the interim analyses, because each of
        # them can be wrong.
        looks = 1 if self.asked["repeats"] else len(significance.LOOKS)
        return ranking.tabulate(self.rows, significance.ERROR / looks)

    def _write(self, status: str) -> Json:
        """Write the tables of all finished runs, and return the content of compare.json.

        Keys of the report are stable: scripts read them.
        """
        table, pairs = self._tabulate()
        results = [result for row in self.rows for result in row.results.values()]
        report = {
            "recipe": self.base.name,
            "status": status,
            "command": self._command(),
            "asked": self.asked,
            "length": self.length and asdict(self.length),
            "repeats": max((row.repeats for row in table), default=0),
            "steps": self.length and self.length.steps,
            "warmup_steps": self.base.logging.warmup_steps,
            "batch_size": self.base.batch_size,
            "model": self.base.model.name,
            "entries": list(map(asdict, table)),
            "pairs": list(map(asdict, pairs)),
            "conclusion": ranking.draw_conclusion(table, pairs),
            "other_programs_cores": self.others.cores(),
            "machine": read_machine(),
            "versions": results[0]["versions"] if results else {},
            "seconds": time.perf_counter() - self.start_time,
        }
        page = comparison_table.as_markdown(report)
        csv_rows = comparison_table.build_csv_rows(report["entries"])
        write_tables(self.folder, "compare", report, page, csv_rows)
        return report

    def _command(self) -> str:
        """Return the command line that starts this comparison."""
        arguments = [self.first[0]]
        if self.asked["modes"] is not None:
            modes = [json.dumps(mode) if " " in mode else mode for mode in self.asked["modes"]]
            arguments.append(f"modes=[{','.join(modes)}]")
        for key in ("nproc", "plugin", "steps", "repeats"):
            if self.asked[key]:
                arguments.append(f"{key}={self.asked[key]}")
        return f"python -m trainer compare {shlex.join([*arguments, *self.asked['words']])}"


def choose_length(
    recipe: Recipe, checked: Sequence[Json], steps: int | None = None, fixed: bool = False
) -> Length:
    """Choose the length of the timed runs, which is the same for all entries.

    Args:
        recipe: the recipe that all entries share.
        checked: result.json of every check that completed.
        steps: measured steps that the user wants. None: about as many as the median entry runs in
            4 s.
        fixed: whether the user has set epochs= or max_steps=, which then determine the length.
    """
    epoch_steps = [result["data"]["train_samples"] // result["batch_size"] for result in checked]
    epoch = max(1, min(epoch_steps))
    if fixed:
        total = recipe.epochs * epoch
        if recipe.max_steps:
            total = min(total, recipe.max_steps)
        return Length(total, recipe.epochs, max(1, total // POINTS))
    warmup = recipe.logging.warmup_steps
    if steps is None:
        times = [result["step_time_s"]["mean"] for result in checked if result["step_time_s"]]
        steps = FEWEST
        if times:
            steps = max(FEWEST, min(MOST, round(SECONDS / median(times))))
        is_synthetic = any(result["data"]["synthetic"] for result in checked)
        if is_synthetic and recipe.data.name != "synthetic":
            # If the images of data.name are missing, a run trains at most SPEED_STEPS steps, on
            # synthetic images.
            from trainer.training.setup import SPEED_STEPS

            steps = max(1, min(steps, SPEED_STEPS - warmup))
    total = warmup + steps
    # Local SGD divides the samples among its ranks first, so its epochs may be a step shorter. One
    # epoch more than needed makes sure that all entries reach `total`.
    epochs = max(recipe.epochs, math.ceil(total / epoch) + 1)
    return Length(total, epochs, max(1, steps // POINTS))


def compute_step_fraction(result: Json) -> float:
    """Return the factor that lowers a run's speed by the time of averaging between its steps.

    The factor is steps / (steps + averaging), both in seconds. Local SGD may average weights once
    per epoch, between steps, and this time must lower its speed. For all other modes the factor
    is 1.
    """
    seconds = result["seconds_in"]
    averaging = seconds.get("averaging", 0.0)
    if averaging and seconds["steps"]:
        return float(seconds["steps"] / (seconds["steps"] + averaging))
    return 1.0

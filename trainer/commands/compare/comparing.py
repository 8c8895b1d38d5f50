"""One comparison: which runs there are, what is read from them, and what is told at the end."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from trainer.commands.compare import comparison_table, ranking
from trainer.commands.compare.entries import Entry
from trainer.commands.compare.ranking import EntryFigures, Length
from trainer.commands.trials import significance
from trainer.commands.trials.engine import TrialEngine, TrialOutcome, TrialRun, drop_weights, merged, speed, steps_of
from trainer.commands.trials.report import Others, TrialsProgress, busy_line, tell_files, this_machine, write_tables
from trainer.errors import Preempted
from trainer.launch import launching
from trainer.processes.terminal import say
from trainer.recipe import Recipe
from trainer.saving.files import usable_json
from trainer.telemetry import readable

FILE = "compare.json"
CHECKED_STEPS = 20  # whose losses are held against single's
CHECK, ROUNDED = 0, -1  # repeats that are not timed
SECONDS, FEWEST, MOST = 4.0, 10, 1000  # a run measures for so long, in so many steps
POINTS = 20  # rows of steps.csv in a run: enough for a curve, too few to slow it
QUIET = ["save.every_epochs=null"]
NEEDED = {"data", "batch_size", "step_time_s", "throughput", "seconds_in", "peak_memory_bytes", "devices", "versions"}


class Comparison:
    """One comparison under way; `word` is the recipe that the command line gets."""

    def __init__(self, folder: Path, base: Recipe, entries: list[Entry], asked: Mapping[str, Any], word: str) -> None:
        self.folder, self.base, self.rows, self.asked = folder, base, entries, asked
        self.first = [f"recipe={word}", *([f"plugin={asked['plugin']}"] if asked["plugin"] else [])]
        self.engine = TrialEngine(folder)
        self.repeats: int = asked["repeats"] or significance.LOOKS[0]  # so far
        kept = usable_json(folder / FILE).get("length")
        self.length = Length(**kept) if kept else None
        self.begun, self.others = time.perf_counter(), Others()
        self.progress = TrialsProgress(len([*self._able()]) * (self.repeats + 1))

    def run(self) -> dict[str, Any]:
        """From the checks to the picture."""
        status = "failed"
        try:
            say(f"comparing {self.base.name}: {len(self.rows)} entries x {self.repeats} repeats, in {self.folder}")
            for row in self.rows:
                how = f"{readable.counted(row.ranks, 'rank')} x {readable.counted(row.threads, 'thread')}"
                say(f"  {row.name}: {row.problem or how}")
            self.engine.run(self._trials(), self._told)
            status = "completed"
        except (KeyboardInterrupt, Preempted):
            status = "interrupted"
            raise
        finally:
            report = self._write(status)
            print("\n" + comparison_table.as_text(report), flush=True)
            curves = self.folder / "tensorboard"
            draw = partial(comparison_table.draw, self.folder, report, curves / self.rows[0].slug)
            tell_files(self.folder, "compare", curves, draw)
        return report

    def _able(self) -> Iterator[Entry]:
        """Who has failed is left out."""
        return (row for row in self.rows if row.problem is None)

    def _trials(self) -> Iterator[TrialRun]:
        """The checks, then A B C A B C: whatever changes in the machine from one round to the next meets all."""
        for row in self._able():
            yield self._check(row, CHECK, [])
            if row.recipe.traits.reference and not row.parts and CHECK in row.results:
                # On a GPU once more, in smaller pieces if the batch divides: what rounding alone does to losses.
                pieces = 2 * row.results[CHECK].get("accumulate", 1)
                if row.results[CHECK]["devices"][0].startswith("cuda"):
                    divides = row.recipe.batch_size % pieces == 0
                    yield self._check(row, ROUNDED, [f"accumulate={pieces}"] * divides)
        checked = [row.results[CHECK] for row in self.rows if CHECK in row.results]
        if not checked:
            return
        fixed = any(word.startswith(("epochs=", "max_steps=")) for word in self.asked["words"])
        self.length = self.length or choose_length(self.base, checked, self.asked["steps"], fixed)
        self._write("running")
        more = ", or more where a difference could go unnoticed" * (self.asked["repeats"] is None)
        say(f"{self.length.steps} steps per run, {self.repeats} runs each{more}")
        for repeat in self._rounds():
            for row in self._able():
                typed = row.words  # what the user says of length and logging goes first
                yield self._trial(row, repeat, merged([*QUIET, *self.length.words()], typed), {})
            self._write("running")

    def _check(self, row: Entry, repeat: int, more: Sequence[str]) -> TrialRun:
        """The first steps with every loss logged: what exactness is read from, and a first idea of the speed."""
        recipe = row.recipe
        words = [f"max_steps={min(CHECKED_STEPS, recipe.max_steps or CHECKED_STEPS)}", "logging.every_steps=1"]
        words += ["logging.tensorboard=false", "logging.verdict=false", *more]
        words += ["precision=fp32"] * (recipe.precision == "tf32")
        return self._trial(row, repeat, merged(row.words, [*QUIET, *words]), {launching.EXACT: "1"})

    def _trial(self, row: Entry, repeat: int, words: Sequence[str], variables: Mapping[str, str]) -> TrialRun:
        name, read = f"runs/{row.slug}/{repeat}", partial(self._read, repeat)
        return TrialRun(name, [*self.first, *words], variables, read, key=(row, repeat))

    def _read(self, repeat: int, path: Path, result: dict[str, Any]) -> dict[str, Any]:
        """result.json. Weights go; of the curves, which repeat themselves, those of the first repeat stay, a folder an
        entry.
        """
        if not result.keys() >= NEEDED:
            raise KeyError("a result of something else")
        drop_weights(path)
        fresh, curves = sorted(path.glob("events.out.tfevents.*")), self.folder / "tensorboard" / path.parent.name
        if repeat != 1:
            for events in fresh:
                events.unlink()
        elif fresh:  # of a run that was done anew, the old ones would be a second curve
            shutil.rmtree(curves, ignore_errors=True)
            curves.mkdir(parents=True)
            for events in fresh:
                events.replace(curves / events.name)
        return result

    def _told(self, trial: TrialRun, outcome: TrialOutcome) -> None:
        """A run has ended, or was done before."""
        row, repeat = trial.key
        steps = steps_of(self.engine.path(trial)) if outcome.error is None else []
        if repeat == ROUNDED:  # without it the tolerance is that of the CPU
            row.rounded = [float(step["train_loss"]) for step in steps]
            return
        news = "done"
        if outcome.error is not None:
            row.problem = outcome.error
            self.progress.total -= self.repeats - repeat
        else:
            result = row.results[repeat] = outcome.value
            if repeat == CHECK:
                row.losses = [float(step["train_loss"]) for step in steps]
            elif result["throughput"]:
                row.speeds[repeat] = speed(steps, result["throughput"]["samples_per_sec"]) * in_steps(result)
                news = f"{readable.number(row.speeds[repeat])} images/s"
        what = f"repeat {repeat}" if repeat else "check of the losses"
        self.progress.tell(f"{row.name}, {what}", outcome, news)

    def _rounds(self) -> Iterator[int]:
        """As many as were asked for; else some, and more as long as a difference that matters could hide."""
        yield from range(1, self.repeats + 1)
        for enough in () if self.asked["repeats"] else significance.LOOKS[1:]:
            hiding = significance.unclear(ranking.sound(*self._tabulated()))
            if not hiding:
                return
            pair = f"{hiding[0].second} and {hiding[0].first}"
            say(f"a difference of {significance.HIDDEN:.0%} may hide in the spread, as between {pair}: more repeats")
            done, self.repeats = self.repeats, enough
            self.progress.total += (enough - done) * len([*self._able()])
            yield from range(done + 1, enough + 1)

    def _tabulated(self) -> tuple[list[EntryFigures], list[significance.Difference]]:
        """Every look may err."""
        looks = 1 if self.asked["repeats"] else len(significance.LOOKS)
        return ranking.tabulate(self.rows, significance.ERROR / looks)

    def _write(self, status: str) -> dict[str, Any]:
        """The tables, with what there is so far; returns what compare.json holds, whose keys are stable."""
        (rows, pairs), others = self._tabulated(), self.others.cores()
        runs = [result for row in self.rows for result in row.results.values()]
        report = {
            "recipe": self.base.name,
            "status": status,
            "command": self._command(),
            "asked": dict(self.asked),  # what `compare` was asked for; `settings` are those of its recipe, resolved
            "length": self.length and asdict(self.length),
            "repeats": max((row.repeats for row in rows), default=0),
            "steps": self.length and self.length.steps,
            "warmup_steps": self.base.logging.warmup_steps,
            "batch_size": self.base.batch_size,
            "model": self.base.model.name,
            "entries": [asdict(row) for row in rows],
            "pairs": [asdict(pair) for pair in pairs],
            "conclusion": [*ranking.conclusion(rows, pairs), *busy_line(others)],
            "other_programs_cores": others,
            "machine": this_machine(),
            "versions": runs[0]["versions"] if runs else {},
            "seconds": time.perf_counter() - self.begun,
        }
        page, rows_of_csv = comparison_table.as_markdown(report), comparison_table.csv_rows(report["entries"])
        write_tables(self.folder, "compare", report, page, rows_of_csv)
        return report

    def _command(self) -> str:
        asked = self.asked
        words = [self.first[0]]
        if asked["modes"] is not None:
            words.append(f"modes=[{','.join(json.dumps(mode) if ' ' in mode else mode for mode in asked['modes'])}]")
        words += [f"{key}={asked[key]}" for key in ("nproc", "plugin", "steps", "repeats") if asked[key]]
        return shlex.join(["python", "-m", "trainer", "compare", *words, *asked["words"]])


def choose_length(
    recipe: Recipe, checked: Sequence[Mapping[str, Any]], steps: int | None = None, fixed: bool = False
) -> Length:
    """How long the timed runs are to be: the same for all.

    Args:
        recipe: what all entries share.
        checked: result.json of the checks that ended well.
        steps: measured ones that the user wants; None: about as many as take the median entry 4 s.
        fixed: the recipe's own length, which the user gave.
    """
    epoch = max(1, min(result["data"]["train_samples"] // result["batch_size"] for result in checked))
    if fixed:
        total = min(recipe.epochs * epoch, recipe.max_steps or recipe.epochs * epoch)
        return Length(total, recipe.epochs, max(1, total // POINTS))
    warmup = recipe.logging.warmup_steps
    if steps is None:
        times = [result["step_time_s"]["mean"] for result in checked if result["step_time_s"]]
        steps = max(FEWEST, min(MOST, round(SECONDS / median(times)))) if times else FEWEST
        if any(result["data"]["synthetic"] for result in checked) and recipe.data.name != "synthetic":
            from trainer.training.setup import SPEED_STEPS  # as many as a run without its data takes

            steps = max(1, min(steps, SPEED_STEPS - warmup))
    total = warmup + steps
    # One more than needed: workers of local SGD count their steps otherwise.
    epochs = max(recipe.epochs, math.ceil(total / epoch) + 1)
    return Length(total, epochs, max(1, steps // POINTS))


def in_steps(result: Mapping[str, Any]) -> float:
    """Share of its steps in a run's steps and averagings: local SGD's once an epoch is between steps, not in them."""
    spent = result["seconds_in"]
    averaging = spent.get("averaging", 0.0)
    return float(spent["steps"] / (spent["steps"] + averaging)) if averaging and spent["steps"] else 1.0

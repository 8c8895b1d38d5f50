"""One comparison, from its folder and its checks to its pictures."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trainer.commands.compare import comparison_table, ranking, running, significance
from trainer.commands.compare.comparison_report import (
    ComparisonReport,
    ComparisonRequest,
    Others,
    this_machine,
)
from trainer.commands.compare.entries import Entry, Sweep
from trainer.commands.compare.exactness import batch_dependent
from trainer.commands.compare.running import Failed, Length, Repeats, Runner
from trainer.commands.plan import plan
from trainer.devices import cards
from trainer.errors import FolderInUseError, Interrupted, RecipeError, TrainerError
from trainer.processes import resources
from trainer.processes.terminal import say
from trainer.recipe import Recipe
from trainer.saving.files import usable_json, write_atomically
from trainer.saving.locks import folder_of
from trainer.telemetry.readable import number

FILE = "compare.json"
START = 4.0  # seconds, about, before a process has its libraries


def predictions(
    entries: Sequence[Entry], folders: Sequence[Path | None], plugin: str | None = None
) -> dict[str, float]:
    """Images/s by entry, without those that nothing can be said of.

    One process is predicted from the run of `single`; several from a measurement of their computing side by side and of
    their exchange, since one alone tells of neither.

    `folders` has a finished run of each entry, None where there is none.
    """
    source = next(
        (folder for entry, folder in zip(entries, folders, strict=True) if entry.traits.reference and folder), None
    )
    speeds: dict[str, float] = {}
    for entry in entries:
        several = entry.ranks > 1
        if entry.traits.reference or entry.problem or _stands_in(entry) or not (several or source):
            continue
        measured = "here" if several else str(source)
        try:
            planned = plan(entry.recipe.replace(threads=entry.threads), entry.ranks, measured=measured, plugin=plugin)
        except (TrainerError, RuntimeError, ValueError):  # as of another model or precision than was measured
            continue
        if planned["predicted_samples_per_sec"] is not None:
            speeds[entry.name] = planned["predicted_samples_per_sec"]
    return speeds


def _stands_in(entry: Entry) -> bool:
    """Whether a CPU does in turn what devices would do at the same time, which a plan is about."""
    if "cpu" not in entry.recipe.devices and cards.detect().count:
        return False
    return (entry.traits.micro_batches and entry.ranks == 1) or entry.ranks * entry.threads > resources.cores()


@contextmanager
def claim(output: str | None, name: str, resume: bool, asked: dict[str, Any]) -> Iterator[Path]:
    """The comparison's folder, held under a lock. Raises FolderInUseError, RecipeError, SetupError."""
    stem = f"runs/compare-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    with folder_of(output, Path(stem), "run") as path:
        kept = usable_json(path / FILE)
        before = kept.get("asked")
        before = before if isinstance(before, dict) else None
        used = before is not None or any((path / file).exists() for file in ("runs", "recipe.yaml", "result.json"))
        if used and not resume:
            raise FolderInUseError(f"{path} is used already: continue with resume=auto, or choose another output=")
        if used and before is None:
            raise FolderInUseError(f"{path} holds something other than a comparison; choose another output=")
        for key, value in asked.items() if before else ():
            if before and key != "repeats" and before.get(key) != value:
                what = f"compares with {key} {before.get(key)}, not {value}; put it back or"
                what = "compares an older version of the recipe;" if key == "settings" else what
                raise RecipeError(f"resume=auto: {path} {what} choose another output=")
        write_atomically(path / FILE, json.dumps({**kept, "asked": asked}, indent=2) + "\n")
        yield path


class Comparison:
    """One comparison under way."""

    def __init__(
        self,
        folder: Path,
        name: str,
        base: Recipe,
        entries: list[Entry],
        sweep: Sweep | None,
        asked: ComparisonRequest,
        word: str,
        predicted: Mapping[str, float],
    ) -> None:
        self.folder, self.name, self.base, self.entries, self.sweep = folder, name, base, entries, sweep
        self.asked, self.predicted = asked, predicted
        self.runner = Runner(folder, word, asked.plugin)
        self.rows = [Repeats(error=entry.problem) for entry in entries]
        self.parts = _parts(entries)
        self.repeats: int = asked.repeats or significance.LOOKS[0]  # so far
        kept: Any = usable_json(folder / FILE).get("length")
        whole = isinstance(kept, dict) and kept.keys() == Length.__annotations__.keys()
        whole = whole and all(isinstance(number, int) and number > 0 for number in kept.values())
        self.length: Length | None = Length(**kept) if whole else None
        self.begun, self.others = time.perf_counter(), Others()
        self.able, self.done = sum(row.error is None for row in self.rows), 0  # entries, runs
        self.seconds: dict[str, float] = {}  # of each entry's latest run, start-up and all

    def run(self) -> ComparisonReport:
        """From the checks to the pictures."""
        status = "failed"
        try:
            self._measure()
            status = "completed"
        except KeyboardInterrupt:
            status = "interrupted"
            where = f"output={self.folder} resume=auto"
            raise Interrupted(
                f"stopped by Ctrl-C; the results so far are in {self.folder}: continue with {where}"
            ) from None
        finally:
            report = self._write(status)
            print("\n" + comparison_table.as_text(report), flush=True)
            files = [f"{self.folder}/compare.md", ".csv", ".json", *(path.name for path in self._draw(report))]
            say(f"  tables   {', '.join(files)}")
            say(f"  watch    python -m tensorboard.main --logdir {self.folder}/tensorboard")
        return report

    def _measure(self) -> None:
        say(f"comparing {self.name}: {len(self.entries)} entries x {self.repeats} repeats, in {self.folder}")
        for entry in self.entries:
            how = f"{entry.ranks} rank{'s' * (entry.ranks > 1)} x {entry.threads} thread{'s' * (entry.threads > 1)}"
            say(f"  {entry.name}: {entry.problem[0] if entry.problem else how}")
        self._round(0)
        checked = [row.results[0] for row in self.rows if 0 in row.results]
        if not checked:
            return
        fixed = any(word.startswith(("epochs=", "max_steps=")) for word in self.asked.words)
        self.length = self.length or running.choose_length(self.base, checked, self.asked.steps, fixed)
        self._write("running")
        more = "" if self.asked.repeats else ", or longer where a difference could go unnoticed"
        say(f"{self.length.steps} steps per run; {tqdm.format_interval(self._left())} left{more}")
        for repeat in self._rounds():
            self._round(repeat)
            self._write("running")
        timed = [self.runner.path(entry, 1) if 1 in row.results else None for entry, row in self._both()]
        say("compared with what plan predicts from a few seconds of measuring")
        self.predicted = {**predictions(self.entries, timed, self.asked.plugin), **self.predicted}

    def _rounds(self) -> Iterator[int]:
        """As many as were asked for; else some, and more as long as a difference that matters could hide."""
        yield from range(1, self.repeats + 1)
        for enough in () if self.asked.repeats else significance.LOOKS[1:]:
            hiding = significance.unclear(
                ranking.sound(*ranking.tabulate(self.entries, self.rows, self.parts, {}, self._error()))
            )
            if not hiding:
                return
            pair = f"{hiding[0].second} and {hiding[0].first}"
            say(f"a difference of {significance.HIDDEN:.0%} may hide in the spread, as between {pair}: more repeats")
            done, self.repeats = self.repeats, enough
            yield from range(done + 1, enough + 1)

    def _error(self) -> float:
        """Every look may err."""
        return significance.ERROR / (1 if self.asked.repeats else len(significance.LOOKS))

    def _both(self) -> Iterator[tuple[Entry, Repeats]]:
        return zip(self.entries, self.rows, strict=True)

    def _left(self) -> float:
        """Seconds that the runs to come will take: as each entry's latest, with the steps that it lacked."""
        assert self.length is not None
        left = 0.0
        for entry, row in ((entry, row) for entry, row in self._both() if row.error is None):
            repeat, result = max(row.results.items())
            step = result["step_time_s"]["mean"] if result["step_time_s"] else 0.0
            lacking = (self.length.steps - result["steps"]) * step
            left += (self.repeats - repeat) * (self.seconds[entry.name] + lacking)
        return left

    def _round(self, repeat: int) -> None:
        """A B C: whatever changes in the machine from one round to the next meets all. Who has failed is left out."""
        for entry, rows in self._both():
            if rows.error is not None:
                continue
            begun = time.perf_counter()
            try:
                if repeat == 0:
                    running.run_check(self.runner, entry, rows)
                    self._note(entry, rows.results[repeat], begun)
                    if entry.traits.reference and not self.parts[entry.name]:
                        running.run_rounded(self.runner, entry, rows)
                elif self.length is not None:
                    running.run_timed(self.runner, entry, rows, repeat, self.length)
                    self._note(entry, rows.results[repeat], begun)
                speed = rows.speeds.get(repeat)
                news = f"{number(speed)} images/s" if speed else "done"
            except Failed as error:
                rows.error = (str(error), error.code)
                news = f"exit {error.code}: {error}"
            self.done += 1
            total = (self.repeats + 1) * self.able
            what = f"repeat {repeat}" if repeat else "check of the losses"
            left = f"; {tqdm.format_interval(self._left())} left" if repeat else ""
            say(f"[{self.done}/{total}] {entry.name}, {what}: {news}, {time.perf_counter() - begun:.0f} s{left}")

    def _note(self, entry: Entry, result: Mapping[str, Any], begun: float) -> None:
        """What a run took that began then; of one that an earlier command did, about that."""
        self.seconds[entry.name] = max(time.perf_counter() - begun, START + result["seconds"])

    def _write(self, status: str) -> ComparisonReport:
        """The tables, with what there is so far."""
        rows, pairs = ranking.tabulate(self.entries, self.rows, self.parts, self.predicted, self._error())
        runs = [result for row in self.rows for result in row.results.values()]
        report = ComparisonReport(
            recipe=self.name,
            status=status,
            command=self._command(),
            asked=self.asked,
            length=self.length,
            repeats=max((row.repeats for row in rows), default=0),
            steps=self.length.steps if self.length else None,
            warmup_steps=self.base.logging.warmup_steps,
            batch_size=self.base.batch_size,
            model=self.base.model.name,
            sweep=self.sweep,
            entries=rows,
            pairs=pairs,
            conclusion=[*ranking.conclusion(rows, pairs), *ranking.explained(rows), *self.others.words()],
            other_programs_cores=self.others.cores(),
            machine=this_machine(),
            versions=runs[0]["versions"] if runs else {},
            seconds=time.perf_counter() - self.begun,
        )
        comparison_table.write_tables(self.folder, report)
        return report

    def _draw(self, report: ComparisonReport) -> list[Path]:
        """Pictures must not hide what came before them."""
        try:
            made = comparison_table.draw(self.folder, report, self.entries, self.sweep)
            comparison_table.to_tensorboard(self.folder, report, self.entries, made)
        except Exception as error:
            say(f"  no pictures: {type(error).__name__}: {' '.join(str(error).split())}")
            return []
        return made

    def _command(self) -> str:
        asked = self.asked
        words = [self.runner.first[0]]
        if asked.modes is not None:
            words.append(f"modes=[{','.join(json.dumps(mode) if ' ' in mode else mode for mode in asked.modes)}]")
        keys = ("sweep", "nproc", "plugin", "steps", "repeats")
        words += [f"{key}={value}" for key in keys if (value := getattr(asked, key))]
        return shlex.join(["python", "-m", "trainer", "compare", *words, *asked.words])


def _parts(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """What in each entry's model depends on how a batch is divided."""
    models: dict[str, list[str]] = {}
    parts = {}
    for entry in entries:
        key = entry.recipe.model.model_dump_json()
        if key not in models:
            models[key] = batch_dependent(entry.recipe)
        parts[entry.name] = models[key]
    return parts

"""Every entry in fresh processes through the real command line, repeats interleaved; what is done stays done."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from trainer.commands.compare.entries import Entry
from trainer.errors import TrainerError
from trainer.launch import launching
from trainer.processes import family
from trainer.recipe import Recipe
from trainer.saving.files import read, read_json, write_atomically, writing
from trainer.saving.steps_file import read_steps

CHECKED_STEPS = 20  # whose losses are held against single's
CHECK, ROUNDED = 0, -1  # repeats that are not timed
SECONDS, FEWEST, MOST = 4.0, 10, 1000  # a run measures for so long, in so many steps
POINTS = 20  # rows of steps.csv in a run: enough for a curve, too few to slow it
FEW_WINDOWS = 5  # have no median to speak of
QUIET = {"logging.progress": "false", "save.every_epochs": "null"}
NEEDED = {"data", "batch_size", "step_time_s", "throughput", "seconds_in", "peak_memory_bytes", "devices", "versions"}
LINGER = 25.0  # seconds that an interrupted run may take to leave


@dataclass
class Repeats:
    """What the runs of one entry left."""

    # result.json of each finished repeat; repeat 0 is the check of the losses, which is not timed
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    speeds: dict[int, float] = field(default_factory=dict)  # images/s of each timed repeat
    losses: list[float] = field(default_factory=list)  # of the check, one a step
    # as losses, of the same mathematics with its sums in another order; empty where that was not run
    rounded: list[float] = field(default_factory=list)
    # (line, exit code) of the run that failed, after which the entry was left alone
    error: tuple[str, int] | None = None


@dataclass(frozen=True)
class Length:
    """How long a timed run is: optimizer steps in all, epochs that hold them, steps from one logged row to the next."""

    steps: int
    epochs: int
    every: int

    def words(self) -> dict[str, str]:
        words = {"max_steps": str(self.steps), "epochs": str(self.epochs), "logging.every_steps": str(self.every)}
        return {**words, "stop.patience": "null"}  # all entries train as long


class Runner:
    """Runs one entry once, in the comparison's folder."""

    def __init__(self, folder: Path, recipe: str, plugin: str | None) -> None:
        """`recipe` is the word that the command line gets."""
        self.folder = folder
        self.first = [f"recipe={recipe}", *([f"plugin={plugin}"] if plugin else [])]

    def path(self, entry: Entry, repeat: int) -> Path:
        return self.folder / "runs" / entry.slug / str(repeat)

    def run(
        self, entry: Entry, repeat: int, words: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """result.json of the run with these words, which is started unless it has ended well before.

        `environment` is added to this process's.

        Raises:
            TrainerError: it failed, with its last line; `code` is its exit code.
            KeyboardInterrupt: Ctrl-C; the run has been stopped, and is done anew the next time.
        """
        path = self.path(entry, repeat)
        command = [*self.first, *words]
        done = finished(path, command)
        if done is not None:
            with writing(self.folder):
                self._tidy(path, repeat)  # it may have been killed before it did
            return done
        with writing(self.folder):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            write_atomically(path / "words.json", json.dumps(command) + "\n")
        log = path.with_suffix(".log")
        code = execute([sys.executable, "-m", "trainer", *command, f"output={path}"], log, environment)
        done = finished(path, command)
        if code != 0 or done is None:
            raise Failed(failure_line(log, code), code if code > 0 else 128 - code if code < 0 else 1)
        with writing(self.folder):
            self._tidy(path, repeat)
        return done

    def _tidy(self, path: Path, repeat: int) -> None:
        """Weights go; of the curves, which repeat themselves, those of the first repeat stay, a folder an entry."""
        shutil.rmtree(path / "checkpoints", ignore_errors=True)
        for weights in path.glob("*.safetensors"):
            weights.unlink()
        fresh, curves = sorted(path.glob("events.out.tfevents.*")), self.folder / "tensorboard" / path.parent.name
        if repeat != 1:
            for events in fresh:
                events.unlink()
        elif fresh:  # of a run that was done anew, the old ones would be a second curve
            shutil.rmtree(curves, ignore_errors=True)
            curves.mkdir(parents=True)
            for events in fresh:
                events.replace(curves / events.name)


class Failed(TrainerError):
    """A run ended with an exit code other than 0."""

    def __init__(self, line: str, code: int) -> None:
        super().__init__(line)
        self.code = code


def run_check(runner: Runner, entry: Entry, rows: Repeats) -> None:
    """The first steps with every loss logged: what exactness is read from, and a first idea of the speed."""
    rows.results[CHECK], rows.losses = _checked(runner, entry, CHECK, {})


def run_rounded(runner: Runner, entry: Entry, rows: Repeats) -> None:
    """On a GPU the check once more, in smaller pieces if the batch divides: what rounding alone does to its losses."""
    pieces = 2 * entry.recipe.accumulate
    if rows.results[CHECK]["devices"][0].startswith("cuda"):
        words = {"accumulate": str(pieces)} if entry.recipe.batch_size % pieces == 0 else {}
        with suppress(Failed):  # then the tolerance is that of the CPU
            _, rows.rounded = _checked(runner, entry, ROUNDED, words)


def _checked(runner: Runner, entry: Entry, repeat: int, more: Mapping[str, str]) -> tuple[dict[str, Any], list[float]]:
    steps = min(CHECKED_STEPS, entry.recipe.max_steps or CHECKED_STEPS)
    words = {"max_steps": str(steps), "logging.every_steps": "1", "logging.tensorboard": "false"}
    words |= {"logging.verdict": "false", **({"precision": "fp32"} if entry.recipe.precision == "tf32" else {})}
    result = runner.run(entry, repeat, merged(entry.words, {**QUIET, **words, **more}), {launching.EXACT: "1"})
    return result, [float(row["train_loss"]) for row in steps_of(runner.path(entry, repeat))]


def run_timed(runner: Runner, entry: Entry, rows: Repeats, repeat: int, length: Length) -> None:
    """A run that counts; what the user's words say of its length and logging goes before `length`."""
    typed = {word.partition("=")[0]: word.partition("=")[2] for word in entry.words}
    result = runner.run(entry, repeat, merged(entry.words, {**QUIET, **length.words(), **typed}))
    rows.results[repeat] = result
    if result["throughput"]:
        rate = speed(steps_of(runner.path(entry, repeat)), result["throughput"]["samples_per_sec"])
        rows.speeds[repeat] = rate * in_steps(result)


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
            from trainer.training.speed_test import STEPS  # as many as a run without its data takes

            steps = max(1, min(steps, STEPS - warmup))
    total = warmup + steps
    # One more than needed: workers of local SGD count their steps otherwise.
    epochs = max(recipe.epochs, math.ceil(total / epoch) + 1)
    return Length(total, epochs, max(1, steps // POINTS))


def speed(rows: Sequence[Mapping[str, str]], mean: float) -> float:
    """Images/s of a run: the median over the windows between its logged rows, each step of a window counting once.

    Other programs disturb a run in bursts, which the mean over the run keeps and the median leaves out: measured on two
    busy cores, repeats of 4 s scatter by 2.7 % instead of 4.0 %. What a mode does now and then (averaging, an epoch's
    start) stays in, as long as it falls into most windows. Short runs have the mean.
    """
    ends = [0, *(int(row["step"]) for row in rows)]
    windows = sorted(
        (float(row["samples_per_sec"]), end - begin)
        for row, begin, end in zip(rows, ends, ends[1:], strict=False)
        if row["samples_per_sec"]
    )
    half, seen = sum(steps for _, steps in windows) / 2, 0
    for rate, steps in windows:
        seen += steps
        if seen >= half and len(windows) >= FEW_WINDOWS:
            return rate
    return mean


def in_steps(result: Mapping[str, Any]) -> float:
    """Share of its steps in a run's steps and averagings: local SGD's once an epoch is between steps, not in them."""
    spent = result["seconds_in"]
    averaging = spent.get("averaging", 0.0)
    return float(spent["steps"] / (spent["steps"] + averaging)) if averaging and spent["steps"] else 1.0


def finished(path: Path, command: Sequence[str]) -> dict[str, Any] | None:
    """result.json of a run that ended well with these very words, else None."""
    try:
        if json.loads(read(path / "words.json")) != list(command):
            return None
        result = read_json(path / "result.json")
        _, damaged = read_steps(path / "steps.csv")
    except (OSError, ValueError, RecursionError):
        return None
    return result if result.get("status") == "completed" and not damaged and result.keys() >= NEEDED else None


def steps_of(path: Path) -> list[dict[str, str]]:
    """steps.csv of a run."""
    return read_steps(path / "steps.csv")[0]


def merged(words: Sequence[str], more: Mapping[str, str]) -> list[str]:
    """The words, with `more` in place of those of the same key."""
    by_key = {word.partition("=")[0]: word for word in words}
    return list({**by_key, **{key: f"{key}={value}" for key, value in more.items()}}.values())


def execute(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> int:
    """Run to the end with its output in `log`; Ctrl-C is passed on, and waited for."""
    with writing(log.parent):
        output = log.open("w", encoding="utf-8")
    variables = {**os.environ, **(environment or {})}
    with output, family.started(command, _linger, variables, subprocess.DEVNULL, output, subprocess.STDOUT) as child:
        return child.wait()


def _linger(child: subprocess.Popen[str]) -> None:
    with suppress(subprocess.TimeoutExpired):
        child.wait(LINGER)


def failure_line(log: Path, code: int) -> str:
    """The last line of a failed run: its error, or the end of a traceback."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("trainer: error: ")]
    if errors:
        return errors[-1].removeprefix("trainer: error: ")
    if code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return lines[-1] if lines else f"ended with exit code {code} and no output"

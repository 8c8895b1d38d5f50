"""Run trials in fresh processes, one at a time in each worker slot.

A command defines the trials and interprets their results:

    with claim_folder(output, Path("runs/sweep-x"), "sweep", "sweep.json", asked) as folder:
        engine = TrialEngine(folder, places=[["devices=[cuda:0]"], ["devices=[cuda:1]"]])
        engine.run(trials(), on_outcome)

The engine asks the generator `trials()` for the next trial whenever a slot is free. So the
generator can choose a trial by the outcomes that `on_outcome` has received. With one slot, the
trials run in the order in which they are yielded (A B C A B C ...).

If the same command is run again, a completed trial does not run again, unless `TrialRun.resumes` is
false and the trial's arguments have changed. A trial that failed or was stopped is resumed if
`TrialRun.resumes` is true, and otherwise starts from scratch. A resumable trial whose loss was not
finite does not run again, because it would fail again.
"""

import itertools
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import Any

from trainer import recipe as recipes
from trainer.errors import (
    FolderInUseError,
    NotFiniteError,
    PeerError,
    RecipeError,
    TrainerError,
)
from trainer.processes import family
from trainer.processes.interrupts import stop_between_runs
from trainer.recipe import list_some
from trainer.recipe.loading import load_stored
from trainer.saving.files import Json, read, read_json_or_empty, report_write_errors, write_json
from trainer.saving.locks import lock_folder
from trainer.saving.steps_file import read_steps

AGAIN = "the same command resumes it"
# Default of `TrialEngine.grace`, in seconds.
LINGER = 25.0
# Seconds between two polls of the running trials.
MOMENT = 0.02
# Minimum number of windows between logged rows for a median speed. If there are fewer, the mean
# speed is used.
MIN_WINDOWS = 5


class TrialFailed(TrainerError):
    """Failure of a run: its reason in one line, and an exit code that is not zero."""

    def __init__(self, line: str, code: int) -> None:
        super().__init__(line)
        self.code = code


@dataclass(frozen=True)
class TrialRun:
    """Run of a trial, described by the arguments that a user would type.

    Attributes:
        name: folder of the run below the engine's folder. Its output goes to a .log file next to
            that folder.
        words: all arguments except output= and those of the worker slot.
        environment: variables that are added to those of this process.
        read: function that computes the value of the trial from the folder and the content of
            result.json, and deletes files that are no longer needed. It raises TrialFailed if the
            trial has failed. It raises KeyError, ValueError or a similar error if the result is
            damaged: a result from an earlier command is then computed again, and a run that has
            just ended counts as failed.
        resumes: whether a stopped run is resumed; otherwise it starts from scratch.
        key: value with which the command identifies the trial.
    """

    name: str
    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[Path, Json], Any] = lambda path, result: result
    resumes: bool = False
    key: Any = None


@dataclass(frozen=True)
class TrialOutcome:
    """Outcome of a trial: its value or its error.

    Attributes:
        value: what `TrialRun.read` returned; None if the trial failed.
        error: why the trial failed; None if it succeeded.
        seconds: duration of the run in seconds; None if an earlier command ran it.
    """

    value: Any = None
    error: TrialFailed | None = None
    seconds: float | None = None


OnOutcome = Callable[[TrialRun, TrialOutcome], object]


@dataclass(frozen=True)
class _RunningTrial:
    trial: TrialRun
    place: int
    child: subprocess.Popen[str]
    stack: ExitStack
    start_time: float


@dataclass
class TrialEngine:
    """Runner of the trials in a folder.

    Attributes:
        folder: folder of all trials.
        places: one list of arguments per worker slot. Each slot runs one trial at a time.
        grace: seconds that runs have to exit after Ctrl-C or SIGTERM, before they are killed.
        timeout: seconds after which a run is considered to hang and is killed.
    """

    folder: Path
    places: Sequence[Sequence[str]] = ((),)
    grace: float = LINGER
    timeout: float = math.inf
    _running: list[_RunningTrial] = field(default_factory=list, init=False)

    def path(self, trial: TrialRun) -> Path:
        return self.folder / trial.name

    def run(self, trials: Iterable[TrialRun], on_outcome: OnOutcome) -> None:
        """Run all trials and call `on_outcome` for each as it ends.

        Raises:
            KeyboardInterrupt: a signal arrived. The unfinished runs are stopped first.
        """
        waiting = iter(trials)
        try:
            while True:
                self._fill_slots(waiting, on_outcome)
                if not self._running:
                    return
                time.sleep(MOMENT)
                for running in list(self._running):
                    outcome = self._poll(running)
                    if outcome:
                        self._running.remove(running)
                        # Leaving the stack kills a run that exceeded the timeout.
                        running.stack.close()
                        on_outcome(running.trial, outcome)
        except KeyboardInterrupt:
            self._stop()
            raise
        finally:
            while self._running:
                self._running.pop().stack.close()

    def value(self, trial: TrialRun) -> Any:
        """Run one trial and return its value.

        Raises:
            TrialFailed: the run failed.
        """
        outcomes = []
        self.run([trial], lambda _, outcome: outcomes.append(outcome))
        [outcome] = outcomes
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _load_outcome(self, trial: TrialRun) -> TrialOutcome | None:
        """Return the outcome of an earlier run, or None if the trial must run."""
        path = self.path(trial)
        result = read_json_or_empty(path / "result.json")
        # A run that ended with a non-finite loss is not resumed, because it would meet the same
        # loss again.
        if (
            trial.resumes
            and result.get("status") == "failed"
            and result.get("exit_code") == NotFiniteError.code
        ):
            return TrialOutcome(error=TrialFailed(str(result.get("error")), NotFiniteError.code))
        if result.get("status") != "completed":
            return None
        try:
            if not trial.resumes:
                stored_words = json.loads(read(path / "words.json"))
                # The second value of read_steps is the number of damaged lines.
                if stored_words != list(trial.words) or read_steps(path / "steps.csv")[1]:
                    return None
            return TrialOutcome(trial.read(path, result))
        except TrialFailed as error:
            return TrialOutcome(error=error)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None

    def _fill_slots(self, waiting: Iterator[TrialRun], on_outcome: OnOutcome) -> None:
        """Start a trial in every free slot.

        A trial whose outcome is known from an earlier run takes no slot; the outcome is reported at
        once.
        """
        slots = {*range(len(self.places))}
        while free := slots - {running.place for running in self._running}:
            trial = next(waiting, None)
            if trial is None:
                return
            outcome = self._load_outcome(trial)
            if outcome:
                on_outcome(trial, outcome)
            else:
                self._running.append(self._start(trial, min(free)))

    def _start(self, trial: TrialRun, place: int) -> _RunningTrial:
        path = self.path(trial)
        words = merge_arguments(trial.words, [*self.places[place], "logging.progress=false"])
        command = [sys.executable, "-m", "trainer", *words, f"output={path}"]
        if trial.resumes:
            command.append("resume=auto")
        with report_write_errors(self.folder, AGAIN):
            if not trial.resumes:
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir(parents=True)
                write_json(path / "words.json", list(trial.words))
            output = log_path(path).open("w", encoding="utf-8")
            print(shlex.join(command), file=output, flush=True)
        stack = ExitStack()
        with output:
            started = family.run_command(
                command,
                {**os.environ, **trial.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            child = stack.enter_context(started)
            return _RunningTrial(trial, place, child, stack, time.perf_counter())

    def _poll(self, running: _RunningTrial) -> TrialOutcome | None:
        """Return the outcome of a run that has ended or hangs, otherwise None."""
        code = running.child.poll()
        seconds = time.perf_counter() - running.start_time
        if code is None:
            if seconds > self.timeout:
                line = f"it did not end within {self.timeout:.0f} s"
                return TrialOutcome(None, TrialFailed(line, PeerError.code), seconds)
            return None
        if code == 0:
            outcome = self._load_outcome(running.trial)
            if outcome:
                return replace(outcome, seconds=seconds)
        line = find_failure(log_path(self.path(running.trial)), code)
        if code < 0:
            # A shell reports a process that a signal killed as 128 + signal.
            code = 128 - code
        # Exit code 0 without a usable result is a failure as well, and is reported as exit code 1.
        return TrialOutcome(None, TrialFailed(line, code or 1), seconds)

    def _stop(self) -> None:
        """Ask all runs to save and exit, and wait. The caller kills those that do not exit."""
        for running in self._running:
            running.child.send_signal(signal.SIGTERM)
        end = time.monotonic() + self.grace
        for running in self._running:
            with suppress(subprocess.TimeoutExpired):
                running.child.wait(max(0.0, end - time.monotonic()))


@contextmanager
def claim_folder(
    output: str | None,
    default: Path,
    kind: str,
    file: str,
    asked: Json,
    command: str = "",
    free: Collection[str] = (),
    resume: bool | None = None,
) -> Iterator[Path]:
    """Lock the folder of a command during the `with` block, and yield its path.

    Args:
        output: folder that the user chose.
        default: folder to use if `output` is None. If it cannot be used for this work, a number is
            appended to its name.
        kind: what the folder holds, for messages, as in "sweep".
        file: name of the file in the folder that stores `asked`.
        asked: arguments that a resumed command must repeat; the value of `settings` is a recipe.
        command: command line that resumes the work. It is stored in `file`, so that a message can
            show it later. Empty: none is stored.
        free: keys of `asked`, and keys and sections of its recipe, that may differ from the
            stored ones.
        resume: whether the user wants to resume. None: the command resumes without an option.

    Raises:
        FolderInUseError: the folder holds something else, is used already and `resume` is False,
            holds work with other arguments and `resume` is None, or is in use by another process.
        RecipeError: `resume` is true, but `asked` differs from the arguments in `file`.
        SetupError: the folder cannot be written.
        Interrupted, Preempted: Ctrl-C or another signal stopped the block; the message says how to
            resume.
    """

    def find_refusal(path: Path) -> TrainerError | None:
        previous = read_json_or_empty(path / file)
        previously_asked = previous.get("asked")
        if not isinstance(previously_asked, dict):
            if path.is_dir() and {*os.listdir(path)} - {".lock"}:
                return FolderInUseError(
                    f"{path} holds something other than a {kind}: choose another output="
                )
            return None
        if resume is False:
            return FolderInUseError(
                f"{path} is used already: resume it with resume=auto, or choose another output="
            )
        changed = _find_changed_keys(previously_asked, asked, free)
        if not changed:
            return None
        remedy = ";"
        if command and "command" in previous:
            remedy = f": to resume that one type {previous['command']}; or"
        line = (
            f"{path} holds a {kind} with other {list_some(changed, 3)}{remedy} choose another "
            "output="
        )
        if resume is None:
            return FolderInUseError(line)
        return RecipeError(f"resume=auto: {line}")

    path = default
    if output:
        path = Path(output).expanduser()
    else:
        for number in itertools.count(2):
            if not find_refusal(path):
                break
            path = default.with_name(f"{default.name}-{number}")
    lock = lock_folder(path, kind)
    try:
        # Check under the lock: another process may have written files before, and a folder that
        # the user typed was not checked yet.
        error = find_refusal(path)
        if error:
            raise error
        content = {**read_json_or_empty(path / file), "asked": asked}
        if command:
            content["command"] = command
        write_json(path / file, content)
        again = AGAIN
        if resume is not None:
            again = f"output={path} resume=auto resumes it"
        with stop_between_runs(f"what was done is kept; {again}"):
            yield path
    finally:
        os.close(lock)


def _find_changed_keys(previous: Json, asked: Json, free: Collection[str]) -> list[str]:
    """Return the keys whose values differ between `previous` and `asked`.

    The keys of the recipe in `settings` are compared one by one. A key that an older version did
    not store in its recipe counts as its default. If one of the recipes is missing or cannot be
    loaded, the result contains "settings".

    Args:
        previous: arguments that the folder's command stored before.
        asked: arguments of the current command.
        free: keys, and sections of the recipe, that are not compared.
    """
    changed = []
    for key in {**asked, **previous}:
        is_compared = key != "settings" and key not in free
        if is_compared and previous.get(key) != asked.get(key):
            changed.append(key)
    if "settings" in asked:
        try:
            old_recipe = load_stored(previous["settings"], "settings")
            new_recipe = load_stored(asked["settings"], "settings")
        except (RecipeError, KeyError):
            return [*changed, "settings"]
        for key in recipes.compare_recipes(old_recipe, new_recipe):
            section = key.partition(".")[0]
            if key not in free and section not in free:
                changed.append(key)
    return changed


def log_path(path: Path) -> Path:
    """Return the path of the .log file, next to the folder `path`, for a process's output."""
    return path.with_name(f"{path.name}.log")


def merge_arguments(words: Sequence[str], more: Iterable[str]) -> list[str]:
    """Join the arguments `words` and `more`. If both contain a key, the one in `more` counts."""
    by_key = {word.partition("=")[0]: word for word in (*words, *more)}
    return list(by_key.values())


def drop_weights(path: Path) -> None:
    """Delete the weights and checkpoints of a run."""
    shutil.rmtree(path / "checkpoints", ignore_errors=True)
    for weights in path.glob("*.safetensors"):
        weights.unlink()


def find_failure(log: Path, code: int) -> str:
    """Return the reason for a failure: the first error in the log, the signal, or the last line.

    Args:
        log: the .log file of the run.
        code: exit code of the process; -N if signal N killed the process.
    """
    # The engine writes the command into the first line, which is skipped.
    lines = log.read_text(errors="replace").splitlines()[1:]
    lines = [line.strip() for line in lines if line.strip()]
    for line in lines:
        # If several processes failed, the first error is the cause of the others.
        if line.startswith("trainer: error: "):
            return line.removeprefix("trainer: error: ")
    if code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    if lines:
        return lines[-1]
    return f"ended with exit code {code} and no output"


def read_steps_file(path: Path) -> list[dict[str, str]]:
    """Return the rows of a run's steps.csv."""
    return read_steps(path / "steps.csv")[0]


def compute_speed(rows: Sequence[Mapping[str, str]], mean: float) -> float:
    """Return the speed of a run in images/s: the median over the windows between logged rows.

    The speed of a window counts once for each of its steps. Other programs disturb a run in bursts,
    which affect the mean but not the median: on two busy cores, medians of repeats of 4 s scatter
    by 2.7 %, and means by 4.0 %. Work that a mode does now and then (averaging, start of an epoch)
    still counts if it falls into most windows.

    Args:
        rows: rows of steps.csv.
        mean: mean speed of the run, which is returned if there are too few windows.
    """
    step_rates = []
    windows = 0
    begin = 0
    for row in rows:
        end = int(row["step"])
        if row["samples_per_sec"]:
            windows += 1
            step_rates += [float(row["samples_per_sec"])] * (end - begin)
        begin = end
    if windows < MIN_WINDOWS:
        return mean
    return median_low(step_rates)

"""Trials: runs in fresh processes, each done once and kept, as many at a time as there are places.

A command says which trials, and what their results mean:

    with claim(output, Path("runs/sweep-x"), "sweep", "sweep.json", asked) as folder:
        TrialEngine(folder, places=[["devices=[cuda:0]"], ["devices=[cuda:1]"]]).run(trials(), told)

`trials()` is asked for the next trial whenever a place is free, so that what it yields may depend on the outcomes that
`told` has heard. With one place they run in turn, in the order in which they are yielded (A B C A B C ...). A trial
that was done before is not done again; one that failed or was stopped is done anew, or goes on (`TrialRun.resumes`).
"""

from __future__ import annotations

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
from typing import Any

from trainer import recipe as recipes
from trainer.errors import FolderInUseError, NotFiniteError, PeerError, Preempted, RecipeError, TrainerError
from trainer.processes import family
from trainer.processes.interrupts import what_is_done_is_kept
from trainer.recipe.loading import load_stored
from trainer.saving.files import read, usable_json, write_atomically, writing
from trainer.saving.locks import folder_of
from trainer.saving.steps_file import read_steps

AGAIN = "the same words continue it"
LINGER = 25.0  # seconds that a run may take to leave once it is told to
MOMENT = 0.02  # seconds between two looks at the runs
FEW_WINDOWS = 5  # have no median to speak of


@dataclass(frozen=True)
class TrialRun:
    """One run, as a user would type it."""

    name: str  # its folder below the engine's; what it prints goes into a .log file beside that
    words: Sequence[str]  # all that one types, but for those of its place and output=
    environment: Mapping[str, str] = field(default_factory=dict)  # added to this process's
    # Makes its value of its folder and its result.json, and removes what need not be kept. TrialFailed: it is of no
    # use. A KeyError, as of a file that is damaged: it is to be done anew.
    read: Callable[[Path, dict[str, Any]], Any] = lambda path, result: result
    resumes: bool = False  # whether it goes on where it was stopped; else it begins anew
    key: Any = None  # what the command knows it by


@dataclass(frozen=True)
class TrialOutcome:
    """How a trial ended."""

    value: Any = None  # what was read from its result
    error: TrialFailed | None = None
    seconds: float | None = None  # from its start to its end; None where it was done before


class TrialFailed(TrainerError):
    """A run ended with an exit code other than 0: the last line that it printed, and that code."""

    def __init__(self, line: str, code: int) -> None:
        super().__init__(line)
        self.code = code


@dataclass(frozen=True)
class _RunningTrial:
    trial: TrialRun
    place: int
    child: subprocess.Popen[str]
    stack: ExitStack
    begun: float


class TrialEngine:
    """Runs trials in a folder.

    Args:
        places: words of where a trial runs, one list for each that may run at the same time.
        grace: seconds that runs may take to leave at Ctrl-C or SIGTERM, before they are killed.
        timeout: seconds after which a trial is killed: it hangs.
    """

    def __init__(
        self, folder: Path, places: Sequence[Sequence[str]] = ((),), grace: float = LINGER, timeout: float = math.inf
    ) -> None:
        self.folder, self.places, self.grace, self.timeout = folder, places, grace, timeout
        self._running: list[_RunningTrial] = []

    def path(self, trial: TrialRun) -> Path:
        return self.folder / trial.name

    def run(self, trials: Iterable[TrialRun], told: Callable[[TrialRun, TrialOutcome], object]) -> None:
        """Run all; `told` hears of each as it ends.

        Raises:
            KeyboardInterrupt, Preempted: the runs under way have been stopped.
        """
        waiting = iter(trials)
        try:
            while True:
                self._begin(waiting, told)
                if not self._running:
                    return
                time.sleep(MOMENT)
                for running in list(self._running):
                    if (outcome := self._outcome(running)) is not None:
                        self._running.remove(running)
                        running.stack.close()
                        told(running.trial, outcome)
        except (KeyboardInterrupt, Preempted):
            self._stop()
            raise
        finally:
            while self._running:
                self._running.pop().stack.close()

    def value(self, trial: TrialRun) -> Any:
        """What is read from one trial. Raises TrialFailed."""
        outcomes: list[TrialOutcome] = []
        self.run([trial], lambda _, outcome: outcomes.append(outcome))
        [outcome] = outcomes
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _kept(self, trial: TrialRun) -> TrialOutcome | None:
        """How a trial ended before that need not run again; None where it is to run."""
        path = self.path(trial)
        result = usable_json(path / "result.json")
        if trial.resumes and result.get("status") == "failed" and result.get("exit_code") == NotFiniteError.code:
            return TrialOutcome(error=TrialFailed(str(result.get("error")), NotFiniteError.code))
        if result.get("status") != "completed":
            return None
        try:
            is_same = trial.resumes or json.loads(read(path / "words.json")) == list(trial.words)
            if not is_same or (not trial.resumes and read_steps(path / "steps.csv")[1]):
                return None
            return TrialOutcome(trial.read(path, result))
        except TrialFailed as error:
            return TrialOutcome(error=error)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None

    def _begin(self, waiting: Iterator[TrialRun], told: Callable[[TrialRun, TrialOutcome], object]) -> None:
        """Start trials wherever a place is free; those that are done already only count."""
        while free := {*range(len(self.places))} - {running.place for running in self._running}:
            trial = next(waiting, None)
            if trial is None:
                return
            if (outcome := self._kept(trial)) is not None:
                told(trial, outcome)
            else:
                self._running.append(self._started(trial, min(free)))

    def _started(self, trial: TrialRun, place: int) -> _RunningTrial:
        path = self.path(trial)
        words = merged(trial.words, [*self.places[place], "logging.progress=false"])
        command = [sys.executable, "-m", "trainer", *words, f"output={path}", *["resume=auto"] * trial.resumes]
        with writing(self.folder, AGAIN):
            if not trial.resumes:
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir(parents=True)
                write_atomically(path / "words.json", json.dumps(list(trial.words)) + "\n")
            output = log_of(path).open("w", encoding="utf-8")
            print(shlex.join(command), file=output, flush=True)
        stack = ExitStack()
        with output:
            variables = {**os.environ, **trial.environment}
            started = family.started(command, None, variables, subprocess.DEVNULL, output, subprocess.STDOUT)
            return _RunningTrial(trial, place, stack.enter_context(started), stack, time.perf_counter())

    def _outcome(self, running: _RunningTrial) -> TrialOutcome | None:
        """How a run has ended; None as long as it goes on."""
        code, seconds = running.child.poll(), time.perf_counter() - running.begun
        if code is None:
            hangs = TrialFailed(f"it did not end within {self.timeout:.0f} s", PeerError.code)
            return TrialOutcome(None, hangs, seconds) if seconds > self.timeout else None
        if code == 0 and (done := self._kept(running.trial)) is not None:
            return replace(done, seconds=seconds)
        line = failure_line(log_of(self.path(running.trial)), code)
        return TrialOutcome(None, TrialFailed(line, code if code > 0 else 128 - code if code else 1), seconds)

    def _stop(self) -> None:
        """Have all runs save and leave; those that do not within their time are killed behind this."""
        for running in self._running:
            running.child.send_signal(signal.SIGTERM)
        end = time.monotonic() + self.grace
        for running in self._running:
            with suppress(subprocess.TimeoutExpired):
                running.child.wait(max(0.0, end - time.monotonic()))


@contextmanager
def claim(
    output: str | None, default: Path, kind: str, file: str, asked: Mapping[str, Any], command: str = "",
    free: Collection[str] = (), resume: bool | None = None,
) -> Iterator[Path]:  # fmt: skip
    """The folder of a command of this kind, held under a lock: `output`, else `default` or that with a number.

    Args:
        file: its file that says what was asked for.
        asked: what the folder is bound to; `settings` are a recipe's.
        command: what one types to go on, where that is all.
        free: of `asked` and of the settings, keys and sections that may change.
        resume: whether the user wants to go on; None: the same words go on by themselves.

    Raises:
        FolderInUseError: it holds something else, or is in use. RecipeError: something else is to go on.
        SetupError: it cannot be written.
        Interrupted, Preempted: in place of KeyboardInterrupt within the block, with what to type.
    """

    def refusal(path: Path) -> TrainerError | None:
        previous = usable_json(path / file)
        before = previous.get("asked")
        if not isinstance(before, dict):
            other = FolderInUseError(f"{path} holds something other than a {kind}; choose another output=")
            return other if path.is_dir() and {*os.listdir(path)} - {".lock"} else None
        if resume is False:
            return FolderInUseError(f"{path} is used already: continue with resume=auto, or choose another output=")
        changed = _changed(before, asked, free)
        if not changed:
            return None
        on = f": to go on with that one type {previous['command']}; or" if command and "command" in previous else ";"
        line = f"{path} holds a {kind} with other {', '.join(changed[:3])}{on} choose another output="
        return FolderInUseError(line) if resume is None else RecipeError(f"resume=auto: {line}")

    with folder_of(output, default, kind, refusal) as path:
        if (error := refusal(path)) is not None:
            raise error
        begun = {**usable_json(path / file), "asked": asked, **({"command": command} if command else {})}
        write_atomically(path / file, json.dumps(begun, indent=2) + "\n")
        again = AGAIN if resume is None else f"output={path} resume=auto continues it"
        with what_is_done_is_kept(f"what was done is kept; {again}"):
            yield path


def _changed(before: Mapping[str, Any], asked: Mapping[str, Any], free: Collection[str]) -> list[str]:
    """Keys that differ; of the settings of an older version, what it did not know has the default."""
    plain = [key for key in {**asked, **before} if key not in {"settings", *free}]
    changed = [key for key in plain if before.get(key) != asked.get(key)]
    if "settings" in asked:
        try:
            old, new = (load_stored(part["settings"], "settings") for part in (before, asked))
        except (RecipeError, KeyError):
            return [*changed, "settings"]
        changed += [key for key in recipes.differing(old, new) if not {key, key.partition(".")[0]} & {*free}]
    return changed


def log_of(path: Path) -> Path:
    """Where what is printed goes, of a process with this folder."""
    return path.with_name(f"{path.name}.log")


def merged(words: Sequence[str], more: Iterable[str]) -> list[str]:
    """The words, with `more` in place of those of the same key."""
    return list({word.partition("=")[0]: word for word in (*words, *more)}.values())


def drop_weights(path: Path) -> None:
    """Remove what a run saved of its model."""
    shutil.rmtree(path / "checkpoints", ignore_errors=True)
    for weights in path.glob("*.safetensors"):
        weights.unlink()


def failure_line(log: Path, code: int) -> str:
    """Why a run failed: its error, of several processes the first one's, or the last line; line 1 is its command."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[1:] if line.strip()]
    errors = [line for line in lines if line.startswith("trainer: error: ")]
    if errors:
        return errors[0].removeprefix("trainer: error: ")
    if code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return lines[-1] if lines else f"ended with exit code {code} and no output"


def steps_of(path: Path) -> list[dict[str, str]]:
    """steps.csv of a run."""
    return read_steps(path / "steps.csv")[0]


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

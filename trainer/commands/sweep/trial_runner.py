"""Runs trials at the same time, each as a user would start it, in a process and a folder of its own.

One thread starts and watches them all: a child dies with the thread that started it, and Ctrl-C reaches only the main
one. Not a `DevicePool`, whose workers would hold a CUDA context and torch's memory beside every trial.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.commands.runs.run_status import finite
from trainer.commands.sweep.sources import Source, TrialOutcome, TrialRun
from trainer.commands.sweep.space import Places, SearchSpace
from trainer.commands.trials.engine import failure_line, merged
from trainer.errors import NotFiniteError, Preempted
from trainer.processes import family
from trainer.processes.interrupts import SAVING
from trainer.saving.files import usable_json, writing

MOMENT = 0.05  # seconds between two looks at the runs
AGAIN = "type the same again"


@dataclass
class _TrialProcess:
    run: TrialRun
    place: int
    path: Path
    child: subprocess.Popen[str]
    stack: ExitStack
    epochs: int = 0  # that were looked at
    early: bool = False
    begun: float = field(default_factory=time.monotonic)


class TrialRunner:
    """Runs what a source gives, at all places; if `watched`, the source is shown the metric of each epoch."""

    def __init__(self, folder: Path, space: SearchSpace, places: Places, metric: str, watched: bool) -> None:
        self.folder, self.space, self.places, self.metric, self.watched = folder, space, places, metric, watched
        self.running: list[_TrialProcess] = []

    def path(self, run: TrialRun) -> Path:
        """The run's folder."""
        return self.folder / run.trial.folder(self.space.seeds[run.repeat] if run.repeat else None)

    def words(self, run: TrialRun) -> list[str]:
        """All that one types for the run, but for its place and its folder."""
        words = self.space.typed(run.trial.values)
        return merged(words, [f"seed={self.space.seeds[run.repeat]}"]) if run.repeat else words

    def execute(self, source: Source, on_end: Callable[[TrialRun, TrialOutcome, float | None], None]) -> None:
        """Run all; `on_end` is told of each end, with the seconds since its start, None where it was done before.

        Raises:
            KeyboardInterrupt, Preempted: the runs under way have been stopped, and can be resumed.
        """
        try:
            while True:
                self._start(source, on_end)
                if not self.running:
                    return
                time.sleep(MOMENT)
                for running in list(self.running):
                    self._look(running, source, on_end)
        except (KeyboardInterrupt, Preempted):
            self._stop()
            raise
        finally:
            for running in self.running:
                running.stack.close()

    def _start(self, source: Source, on_end: Callable[[TrialRun, TrialOutcome, float | None], None]) -> None:
        """Start runs wherever a place is free; those that are done already only count."""
        taken = {running.place for running in self.running}
        free = [place for place in range(len(self.places.devices)) if place not in taken]
        while free and (run := source.next()) is not None:
            done = self.kept(run, source.given_up(run))
            if done is not None:
                source.ended(run, done)
                on_end(run, done, None)
                continue
            self.running.append(self._started(run, free.pop(0)))

    def _started(self, run: TrialRun, place: int) -> _TrialProcess:
        path = self.path(run)
        words = merged([*self.words(run), *self.places.words(place)], ["logging.progress=false"])
        command = [sys.executable, "-m", "trainer", *words, f"output={path}", "resume=auto"]
        with writing(self.folder, AGAIN):
            output = self.log(run).open("w", encoding="utf-8")
            output.write(shlex.join(command) + "\n")
            output.flush()
        stack = ExitStack()
        with output:
            child = stack.enter_context(
                family.started(command, None, None, subprocess.DEVNULL, output, subprocess.STDOUT)
            )
        return _TrialProcess(run, place, path, child, stack)

    def log(self, run: TrialRun) -> Path:
        """What the run printed, beside its folder."""
        return self.folder / f"{self.path(run).name}.log"

    def _look(
        self, running: _TrialProcess, source: Source, on_end: Callable[[TrialRun, TrialOutcome, float | None], None]
    ) -> None:
        """One look at a run: its new epoch, or its end."""
        code = running.child.poll()
        if code is None:
            if self.watched and not running.early:
                self._show_epoch(running, source)
            return
        self.running.remove(running)
        running.stack.close()
        outcome = self._outcome(running, code)
        source.ended(running.run, outcome)
        on_end(running.run, outcome, time.monotonic() - running.begun)

    def _show_epoch(self, running: _TrialProcess, source: Source) -> None:
        result = usable_json(running.path / "result.json")
        value, epochs = finite(result.get(f"val_{self.metric}")), result.get("epochs")
        if value is None or not isinstance(epochs, int) or epochs <= running.epochs:
            return
        running.epochs = epochs
        if source.hopeless(running.run, epochs, value):
            running.early = True
            running.child.send_signal(signal.SIGTERM)

    def _outcome(self, running: _TrialProcess, code: int) -> TrialOutcome:
        result = usable_json(running.path / "result.json")
        if running.early and code in (0, Preempted.code):
            return self._of(result, early=code != 0)
        if code == 0:
            return self._of(result)
        code = code if code > 0 else 128 - code
        return self._of(result, failure_line(self.log(running.run), running.child.returncode), code)

    def kept(self, run: TrialRun, given_up: bool) -> TrialOutcome | None:
        """How a run ended that need not run again: completed, given up, or its loss was not finite; else None."""
        result = usable_json(self.path(run) / "result.json")
        if given_up:
            return self._of(result, early=True)
        if result.get("status") == "completed":
            return self._of(result)
        if result.get("status") == "failed" and result.get("exit_code") == NotFiniteError.code:
            return self._of(result, str(result.get("error")), NotFiniteError.code)
        return None

    def _of(self, result: dict[str, Any], error: str | None = None, code: int = 0, early: bool = False) -> TrialOutcome:
        value, seconds = finite(result.get(f"best_{self.metric}")), finite(result.get("seconds"))
        if value is None and error is None and not early:
            error, code = f"no epoch was evaluated, so there is no {self.metric}: raise max_steps, or give data.root", 2
        epochs, images = _count(result.get("epochs")), _count((result.get("data") or {}).get("val_samples"))
        return TrialOutcome(value, epochs, seconds or 0.0, images, error, code, early)

    def _stop(self) -> None:
        """Have all runs save and leave; those that do not within their time are killed behind this."""
        for running in self.running:
            with suppress(ProcessLookupError):
                running.child.send_signal(signal.SIGTERM)
        end = time.monotonic() + self.space.base.grace + SAVING
        for running in self.running:
            with suppress(subprocess.TimeoutExpired):
                running.child.wait(max(0.0, end - time.monotonic()))


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0

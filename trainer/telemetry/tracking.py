"""Watching a run: progress bar or plain lines, TensorBoard, steps.csv, result.json; and the null twin of all that.

Rank 0 has a `Tracker`; every other rank the `NullTracker`, so nobody asks which rank it is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trainer.processes.terminal import as_typed
from trainer.recipe import Recipe
from trainer.saving.checkpoint import Position
from trainer.saving.files import write_atomically, writing
from trainer.saving.run_folder import NullFolder, RunFolder
from trainer.saving.steps_file import StepsFile
from trainer.telemetry.dashboards import arranged
from trainer.telemetry.events import Events, trim_events
from trainer.telemetry.loggers import Loggers
from trainer.telemetry.readable import duration


class NullTracker:
    """What a `Tracker` answers on ranks that have no run folder."""

    folder = NullFolder()
    path: Path | None = None
    shows = False  # whether there is a page to make pictures and texts for

    def say(self, text: str) -> None: ...
    def settle(self, recipe: Recipe) -> None: ...
    def start(self, position: Position, total_steps: int, metric: str) -> None: ...
    def scalars(self, values: Mapping[str, float], step: int) -> None: ...
    def text(self, tag: str, text: str, step: int) -> None: ...
    def show(self, summary: Any, step: int) -> None: ...
    def step(self, row: Mapping[str, Any]) -> None: ...
    def progress(self, step: int, epoch: int) -> None: ...
    def evaluating(self, done: int, total: int) -> None: ...
    def result(self, result: Mapping[str, Any]) -> None: ...
    def remember(self, known: Mapping[str, Any]) -> None: ...
    def keep(self, name: str, text: Callable[[], str]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...

    def known(self) -> dict[str, Any]:
        return {}

    def previous_result(self) -> dict[str, Any]:
        return {}


class Tracker(NullTracker):
    """The run folder's writer."""

    folder: RunFolder
    path: Path

    def __init__(self, recipe: Recipe, folder: RunFolder) -> None:
        self.recipe = recipe
        self.folder = folder
        self.path = folder.path
        self._bar: Any = None
        self._steps: StepsFile | None = None
        self._events: Any = None
        self._loggers: Loggers | None = None
        self._spoke = 0.0
        self._news = ""  # the latest loss and speed
        self._kind = bar_kind() if recipe.logging.progress else None

    def say(self, text: str) -> None:
        """Print a line."""
        text = as_typed(text)
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
            return
        with suppress(BrokenPipeError):  # `| head` has read enough; the run goes on
            print(text, flush=True)

    def settle(self, recipe: Recipe) -> None:
        """The recipe, with what this run chose where it left something open."""
        self.recipe = recipe

    def start(self, position: Position, total_steps: int, metric: str) -> None:
        """Training begins here, and goes on to so many steps; `metric` is what people look at beside the loss."""
        self._total = total_steps
        self._paced: tuple[int, float] | None = None
        with writing(self.path):
            self.folder.write_recipe(self.recipe)
            self._steps = StepsFile(self.path, position.step, self.say)
            if self.recipe.logging.tensorboard:
                self._open_events(position, metric)
        self._loggers = Loggers(self.recipe, self.path, self.say)
        if self._kind is not None:
            self._bar = self._kind(
                total=total_steps, initial=position.step, unit="step", dynamic_ncols=True, leave=False, mininterval=0.2,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            )  # fmt: skip

    def _open_events(self, position: Position, metric: str) -> None:
        self._metric = metric
        trim_events(self.path, position, self.say)
        self._events = Events(self.path)
        self._events.begin(position.step + 1)
        self.shows = True

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Values by their TensorBoard tags; `step` is the optimizer's."""
        if self._events is not None:
            with writing(self.path):
                self._events.scalars(arranged(values, self._metric), step)
        if self._loggers is not None:
            self._loggers.scalars(values, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Markdown for TensorBoard's text tab."""
        if self._events is not None:
            with writing(self.path):
                self._events.text(tag, text, step)

    def show(self, summary: Any, step: int) -> None:
        """Anything else for TensorBoard: a layout, a table's columns, a picture."""
        if self._events is not None:
            with writing(self.path):
                self._events.add(summary, step)

    def step(self, row: Mapping[str, Any]) -> None:
        """A logged step: a row of steps.csv."""
        if self._steps is not None:
            self.folder.check()  # a suspended run may wake up in a folder that another run has taken
            with writing(self.path):
                self._steps.add(row)
        self._news = f", loss {row['train_loss']:.4f}"
        self._news += f", {row['samples_per_sec']:,.0f} images/s" if row["samples_per_sec"] else ""

    def progress(self, step: int, epoch: int) -> None:
        """Training is at this step, in this epoch (from 1); called about once a second, or after every
        step that takes longer."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"epoch {epoch}/{self.recipe.epochs}{self._news}", refresh=False)
            self._bar.update(step - self._bar.n)
        elif self.recipe.logging.progress and time.perf_counter() - self._spoke > 5:
            self._spoke = time.perf_counter()
            left = self._left(step)
            self.say(f"step {step}/{self._total}, epoch {epoch}/{self.recipe.epochs}{self._news}{left}")
        elif self.recipe.logging.progress:
            self._left(step)

    def _left(self, step: int) -> str:
        """How long it still takes, by the steps after the first one reported, which waited for everything to start."""
        now = time.perf_counter()
        self._paced = self._paced or (step, now)
        first, begun = self._paced
        return f", {duration((now - begun) / (step - first) * (self._total - step))} left" if step > first else ""

    def evaluating(self, done: int, total: int) -> None:
        """Evaluation is at batch `done` of `total`."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"evaluating {done}/{total}", refresh=False)
            self._bar.update(0)

    def result(self, result: Mapping[str, Any]) -> None:
        """Replace result.json."""
        self.folder.write_result(result)
        if self._loggers is not None:
            self._loggers.result(result)

    def known(self) -> dict[str, Any]:
        """What an earlier part of the run measured to choose how to run."""
        return self.folder.known(self.say)

    def remember(self, known: Mapping[str, Any]) -> None:
        """Keep it for later parts."""
        self.folder.remember(known)

    def previous_result(self) -> dict[str, Any]:
        """result.json of an earlier part of the run, empty where there is none."""
        return self.folder.previous_result(self.say)

    def keep(self, name: str, text: Callable[[], str]) -> None:
        """A text in the run folder; one that is there already stays."""
        if not (self.path / name).exists():
            with writing(self.path):
                write_atomically(self.path / name, text())

    def flush(self) -> None:
        """Everything logged so far is in its file: a checkpoint is as old."""
        with writing(self.path):
            if self._steps is not None:
                self._steps.sync()
            if self._events is not None:
                self._events.sync()

    def close(self) -> None:
        """Flush and close every file."""
        bar, steps, events, loggers = self._bar, self._steps, self._events, self._loggers
        self._bar = self._steps = self._events = self._loggers = None
        with ExitStack() as closing:  # all of them, also when a disk is full
            closing.callback(self.folder.close)
            closing.enter_context(writing(self.path))
            for part in (loggers, bar, steps, events):
                if part is not None:
                    closing.callback(part.close)


def bar_kind() -> Any:
    """tqdm's bar for a notebook or for a terminal; None elsewhere, where lines tell of the progress."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and "IPKernelApp" in shell.config:
        from tqdm import notebook

        widgets = getattr(notebook, "IProgress", None) is not None  # ipywidgets is there
        return notebook.tqdm if widgets else tqdm
    return tqdm if sys.stderr is not None and sys.stderr.isatty() else None

"""Watching a run: a live line or plain lines, TensorBoard, steps.csv, result.json; and the null twin of all that.

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

from trainer.processes.terminal import BOLD, DIM, as_typed, rewrites, styled
from trainer.recipe import Recipe
from trainer.saving.checkpoint import Position
from trainer.saving.files import write_atomically, writing
from trainer.saving.journal import OTHER, Journal, NullJournal
from trainer.saving.run_folder import NullFolder, RunFolder
from trainer.saving.steps_file import StepsFile
from trainer.telemetry.clocks import Ledger
from trainer.telemetry.events import Events, arranged, trim_events
from trainer.telemetry.loggers import Loggers
from trainer.telemetry.readable import columns, duration, titled

LIVE, LOGGED = 0.2, 60.0  # seconds between two states of the live line; between two lines where there is none
SECONDS, BAR = 10.0, 0.5  # between two lines before the first step, or two moves of a bar
NARROW = 8  # characters of a column


class NullTracker:
    """What a `Tracker` answers on ranks that have no run folder."""

    folder = NullFolder()
    journal = NullJournal()
    path: Path | None = None
    shows = False  # whether there is a page to make pictures and texts for

    def say(self, text: str, style: str = "") -> None: ...
    def row(self, cells: Mapping[str, str], best: bool) -> None: ...
    def resolved(self, recipe: Recipe) -> None: ...
    def start(self, position: Position, total_steps: int, metric: str) -> None: ...
    def scalars(self, values: Mapping[str, float], step: int) -> None: ...
    def show(self, summary: Any, step: int) -> None: ...
    def step(self, row: Mapping[str, Any]) -> None: ...
    def progress(self, step: int, epoch: int, loss: float, speed: float | None) -> None: ...
    def evaluating(self, done: int, total: int, speed: float) -> None: ...
    def result(self, result: Mapping[str, Any]) -> None: ...
    def keep(self, name: str, text: Callable[[], str]) -> None: ...
    def replace(self, name: str, text: str) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...

    def print_lines(self, facts: Mapping[str, str], lines: int | None = None) -> int:
        return len(facts)


class Tracker(NullTracker):
    """The run folder's writer."""

    folder: RunFolder
    path: Path

    def __init__(self, recipe: Recipe, folder: RunFolder, ledger: Ledger | None = None, ours: bool = False) -> None:
        """`ledger`, `ours`: what this process spends its seconds on, and whether it is there for this run only."""
        self.recipe = recipe
        self.folder = folder
        self.path = folder.path
        self.journal = Journal(folder.path, folder.check, (ledger or Ledger(OTHER)).by_now, ours)
        self._bar: Any = None
        self._steps: StepsFile | None = None
        self._events: Any = None
        self._loggers: Loggers | None = None
        self._widths: dict[str, int] = {}  # of the columns, once their titles are printed

    def say(self, text: str, style: str = "") -> None:
        """Print a line, in one of the terminal's styles."""
        self._print(styled(as_typed(text), style))

    def print_lines(self, facts: Mapping[str, str], lines: int | None = None) -> int:
        """Print what is known beside its titles, each in so many lines at most; returns how many there are."""
        printed = [(len(title) + 2, titled(title, as_typed(text), lines)) for title, text in facts.items()]
        for width, text in printed:
            self._print(styled(text[:width], DIM) + text[width:])
        return sum(text.count("\n") + 1 for _, text in printed)

    def row(self, cells: Mapping[str, str], best: bool) -> None:
        """Print an epoch's figures below their titles, which are printed once; the best epoch so far is bold."""
        if not self._widths:
            self._widths = {title: max(NARROW, len(title), len(cell)) for title, cell in cells.items()}
            self._widths["epoch"] = max(map(len, ("epoch", cells["epoch"])))
            while sum(self._widths.values()) + 2 * len(self._widths) > columns(80):
                del self._widths[[*self._widths][-3]]  # the last metric
            self.say("  ".join(title.rjust(width) for title, width in self._widths.items()), DIM)
        self.say("  ".join(cells[title].rjust(width) for title, width in self._widths.items()), BOLD if best else "")

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
            return
        with suppress(BrokenPipeError):  # `| head` has read enough; the run goes on
            print(text, flush=True)

    def resolved(self, recipe: Recipe) -> None:
        """The recipe, with what this run chose where it left something open."""
        self.recipe = recipe

    def start(self, position: Position, total_steps: int, metric: str) -> None:
        """Training begins here, and goes on to so many steps; `metric` is what people look at beside the loss."""
        self._total, self._epoch = total_steps, position.epoch + 1
        self._paced: tuple[int, float] | None = None
        with writing(self.path):
            self.folder.write_recipe(self.recipe)
            self._steps = StepsFile(self.path, position.step, self.say)
            if self.recipe.logging.tensorboard:
                trim_events(self.path, position, self.say)
                self._events, self._metric, self.shows = Events(self.path), metric, True
                self._events.begin(position.step + 1)
        self._loggers = Loggers(self.recipe, self.path, self.say)
        self.journal.resumed(position.step)
        self._spoke = time.perf_counter()
        if self.recipe.logging.progress and (kind := bar_kind()) is not None:
            self._bar = kind(
                total=total_steps, initial=position.step, dynamic_ncols=True, leave=False, bar_format="{desc} {bar}"
            )
            self._bar.set_description_str(f"epoch {self._epoch}/{self.recipe.epochs}  starting")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Values by their TensorBoard tags; `step` is the optimizer's."""
        if self._events is not None:
            with writing(self.path):
                self._events.scalars(arranged(values, self._metric), step)
        if self._loggers is not None:
            self._loggers.scalars(values, step)

    def show(self, summary: Any, step: int) -> None:
        """Anything else for TensorBoard: a layout, a picture."""
        if self._events is not None:
            with writing(self.path):
                self._events.add(summary, step)

    def step(self, row: Mapping[str, Any]) -> None:
        """A logged step: a row of steps.csv."""
        if self._steps is not None:
            self.folder.check()  # a suspended run may wake up in a folder that another run has taken
            with writing(self.path):
                self._steps.add(row)

    def progress(self, step: int, epoch: int, loss: float, speed: float | None) -> None:
        """Training is at this step, in this epoch (from 1), with the latest loss and images/s.

        Called about once a second, or after every step that takes longer.
        """
        now, self._epoch = time.perf_counter(), epoch
        self.journal.mark(step)
        first, begun = self._paced = self._paced or (step, now)  # the first steps wait for everything to start
        left = (now - begun) / (step - first) * (self._total - step) if step > first else None
        rate = f"{speed:,.0f} images/s" if speed else ""
        clock = f"{tqdm.format_interval(left)} left" if left is not None else ""
        self._state(f"step {step}/{self._total}", f"loss {loss:.4f}", rate, clock, step=step)

    def evaluating(self, done: int, total: int, speed: float) -> None:
        """Evaluation is at batch `done` of `total`, with so many images/s."""
        self.journal.mark()
        self._state(f"evaluating {done}/{total}", f"{speed:,.0f} images/s")

    def _state(self, *parts: str, step: int | None = None) -> None:
        """The live line's new state; where there is none, a line now and then."""
        now = time.perf_counter()
        if not self.recipe.logging.progress or now - self._spoke < (LOGGED if self._bar is None else LIVE):
            return
        self._spoke = now
        text = "  ".join(filter(None, (f"epoch {self._epoch}/{self.recipe.epochs}", *parts)))
        if self._bar is None:
            self.say(text)
            return
        self._bar.n = self._bar.n if step is None else step
        self._bar.set_description_str(text)

    def result(self, result: Mapping[str, Any]) -> None:
        """Replace result.json."""
        self.folder.write_result(result)
        if self._loggers is not None:
            self._loggers.result(result)

    def keep(self, name: str, text: Callable[[], str]) -> None:
        """A text in the run folder; one that is there already stays."""
        if not (self.path / name).exists():
            self.replace(name, text())

    def replace(self, name: str, text: str) -> None:
        """A text in the run folder, in the place of an earlier one."""
        with writing(self.path):
            write_atomically(self.path / name, text)

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
            closing.callback(self.journal.close)
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
    return tqdm if rewrites(sys.stderr) else None


class Progress:
    """Of work before the first step: a bar on a terminal, else a line now and then."""

    def __init__(self, total: int, show: bool, what: str, unit: str, first: float = SECONDS) -> None:
        """`what` is done with `total` things, each a `unit`; lines begin after `first` seconds."""
        bar = bar_kind() if show else None
        self._bar = bar(total=total, unit=unit, desc=what, leave=False) if bar else None
        self._show, self._total, self._done = show, total, 0
        self._what, self._unit = what, unit
        self._start = time.monotonic()
        self._next = self._start + first

    def more(self, count: int = 1) -> None:
        """So many more are done."""
        self.left(self._total - self._done - count)

    def due(self) -> bool:
        """Whether `left` would be seen."""
        return self._show and time.monotonic() >= self._next

    def left(self, count: int) -> None:
        """So many are missing."""
        new, self._done = self._total - count - self._done, self._total - count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(new)
            self._next = now + BAR
        elif self._show and now >= self._next and self._done and count:
            self._next = now + SECONDS
            seconds = count * (now - self._start) / self._done
            done = f"{self._done:,} of {self._total:,} {self._unit}s"
            print(f"  {self._what}: {done}, about {duration(seconds)} left", flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

"""Output of a run: a progress bar or plain lines, TensorBoard, tables and result.json.

Rank 0 has a `Tracker` and every other rank a `NullTracker`, so no caller checks its rank.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trainer.processes.terminal import (
    BOLD,
    DIM,
    add_style,
    can_overwrite,
    fill,
    fit,
    localize_commands,
    show,
    terminal_width,
)
from trainer.recipe import Recipe, find_own_values
from trainer.recipe.field_types import parse_duration
from trainer.saving.checkpoint import Position
from trainer.saving.files import report_write_errors, write_atomically
from trainer.saving.journal import Journal, NullJournal
from trainer.saving.run_folder import NullFolder, RunFolder
from trainer.saving.steps_file import EpochsFile, StepsFile
from trainer.telemetry.clocks import Ledger
from trainer.telemetry.events import (
    Events,
    has_old_tags,
    hparams_summary,
    rename_as_before,
    trim_events,
)
from trainer.telemetry.loggers import Loggers, collect_final_figures
from trainer.telemetry.readable import format_duration, format_titled, table_width

# Minimum number of seconds between two updates of the progress bar, and between two lines of a run
# without a bar.
LIVE = 0.2
LINE_SECONDS = 60.0
# The same intervals before the first step.
EARLY_BAR_SECONDS = 0.5
SECONDS = 10.0
# Minimum width of a column in characters, if the table is not too wide for the terminal.
MIN_COLUMN = 8
# Minimum width of the progress bar in characters.
MIN_BAR = 10


class NullTracker:
    """Tracker that does nothing, for ranks without a run folder."""

    folder = NullFolder()
    journal = NullJournal()
    path: Path | None = None
    # The recipe, in which the run replaces automatic values by its choices.
    recipe: Recipe
    # Whether TensorBoard is enabled, so that summaries such as pictures must be created for it.
    shows = False

    def say(self, text: str, style: str = "") -> None: ...
    def row(self, cells: Mapping[str, str], best: bool, step: int) -> None: ...

    def start(
        self, position: Position, total_steps: int, metric: str, evaluated_step: int = 0
    ) -> None: ...
    def scalars(self, values: Mapping[str, float], step: int) -> None: ...
    def show(self, summary: Any, step: int) -> None: ...
    def step(self, row: Mapping[str, Any]) -> None: ...
    def epoch(self, row: Mapping[str, Any]) -> None: ...
    def progress(
        self,
        step: int,
        epoch: int,
        loss: float,
        speed: float | None,
    ) -> None: ...
    def evaluating(self, done: int, total: int, speed: float) -> None: ...
    def result(self, result: Mapping[str, Any]) -> None: ...
    def compare(self, result: Mapping[str, Any], figures: Sequence[str]) -> None: ...
    def keep(self, name: str, text: Callable[[], str]) -> None: ...
    def replace(self, name: str, text: str) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...

    def print_lines(
        self,
        texts: Mapping[str, str],
        lines: int | None = None,
    ) -> int:
        return len(texts)


class Tracker(NullTracker):
    """Tracker of rank 0, which writes the run folder and prints to the terminal."""

    folder: RunFolder
    path: Path

    def __init__(
        self, recipe: Recipe, folder: RunFolder, ledger: Ledger, ours: bool = False
    ) -> None:
        """Open the journal of a run.

        Args:
            recipe: Recipe of the run.
            folder: Run folder, which this process has claimed.
            ledger: Seconds of this process by activity, for the journal.
            ours: Whether this process exists only for this run.
        """
        self.recipe = recipe
        self._own_values = find_own_values(recipe)
        self.folder = folder
        self.path = folder.path
        self.journal = Journal(folder.path, folder.check, ledger.read_seconds, ours)
        self._bar: Any = None
        self._steps: StepsFile | None = None
        self._epochs: EpochsFile | None = None
        self._events: Any = None
        # Whether version 0.1 started this run. Its curves continue under its tags.
        self._has_old_tags = False
        self._loggers: Loggers | None = None
        # Width of each printed column in characters, by its title; empty until the first row.
        self._widths: dict[str, int] = {}
        self._gap = "  "
        self._ledger = ledger
        # Title of the column of the time left. With stop.patience, the run may end earlier.
        self._left = "left" if recipe.stop.patience is None else "left at most"
        # Step and time of the first call of `progress`.
        self._paced: tuple[int, float] | None = None

    def say(self, text: str, style: str = "") -> None:
        """Print a line, in a style of `processes.terminal`."""
        self._print(add_style(localize_commands(fit(text)), style))

    def print_lines(
        self,
        texts: Mapping[str, str],
        lines: int | None = None,
    ) -> int:
        """Print strings next to their titles, wrapped to the width of the terminal.

        Args:
            texts: String to print by title.
            lines: Maximum number of lines of a string. Longer strings are left out. None for no
                limit.

        Returns:
            The number of printed lines.
        """
        count = 0
        for title, text in texts.items():
            printed = format_titled(title, localize_commands(text))
            needed = printed.count("\n") + 1
            if lines is None or needed <= lines:
                width = len(title) + 2
                self._print(add_style(printed[:width], DIM) + printed[width:])
                count += needed
        return count

    def row(
        self,
        cells: Mapping[str, str],
        best: bool,
        step: int,
    ) -> None:
        """Print the metrics of an epoch in columns. The titles of the columns are printed once.

        Args:
            cells: Formatted values by column title: "epoch", the losses, the metrics, then "lr" and
                other columns.
            best: Whether this is the best epoch so far, whose row is printed in bold.
            step: Number of steps done, for the column of the time left.
        """
        cells = {**cells, self._left: self._estimate_left(step) or "-"}
        if not self._widths:
            self._choose_widths(cells)
            titles = [fill(title, width).split("\n")[::-1] for title, width in self._widths.items()]
            for line in [*zip_longest(*titles, fillvalue="")][::-1]:
                self.say(self._align(line), DIM)
        figures = [cells[title] for title in self._widths]
        self.say(self._align(figures), BOLD if best else "")

    def _choose_widths(self, cells: Mapping[str, str]) -> None:
        """Choose the columns and their widths by the titles and the first row."""
        for title, cell in cells.items():
            self._widths[title] = max(MIN_COLUMN, len(title), len(cell))
        self._widths["epoch"] = max(len("epoch"), len(cells["epoch"]))
        # If the table is too wide, break titles between words, then reduce the gaps.
        for gap, minimum in (("  ", 7), (" ", 6)):
            if self._is_too_wide():
                self._gap = gap
                for title, cell in [*cells.items()][1:]:
                    self._widths[title] = max(minimum, len(cell), *map(len, title.split()))
        titles = [*cells]
        # Then leave out columns: metrics from the last to the second, the seconds, the speed.
        for title in [*titles[titles.index("lr") - 1 : 3 : -1], "seconds", "images/s"]:
            if self._is_too_wide():
                del self._widths[title]

    def _is_too_wide(self) -> bool:
        gaps = len(self._gap) * (len(self._widths) - 1)
        return sum(self._widths.values()) + gaps > table_width()

    def _align(self, cells: Iterable[str]) -> str:
        widths = self._widths.values()
        return self._gap.join(map(str.rjust, cells, widths))

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
            return
        show(f"{text}\n")

    def start(
        self, position: Position, total_steps: int, metric: str, evaluated_step: int = 0
    ) -> None:
        """Open the files at the start of training.

        Args:
            position: Position at which training starts.
            total_steps: Number of steps of the whole run.
            metric: Name of the main metric.
            evaluated_step: Step of the last evaluation, or 0 if it is not known.
        """
        self._total = total_steps
        self._epoch = position.epoch + 1
        with report_write_errors(self.path):
            self.folder.write_recipe(self.recipe)
            self._steps = StepsFile(self.path, position.step, self.say)
            # A checkpoint may have been saved before the evaluation of its step, which is then done
            # again. Checkpoints of earlier versions do not store the evaluated step, but those at
            # the end of an epoch were saved after its evaluation.
            is_evaluated = evaluated_step == position.step
            if evaluated_step == position.step_in_epoch == 0:
                is_evaluated = True
            last_step = position.step if is_evaluated else position.step - 1
            self._epochs = EpochsFile(self.path, last_step, self.say)
            if self.recipe.logging.tensorboard:
                self._has_old_tags = position.step > 0 and has_old_tags(self.path)
                self._metric = metric
                trim_events(self.path, position, is_evaluated, self.say)
                self._events = Events(self.path)
                self.shows = True
                self._events.begin(position.step + 1)
        self._loggers = Loggers(self.recipe, self.path, self.say)
        self.journal.resumed(position.step)
        self._spoke = time.perf_counter()
        make_bar = choose_bar() if self.recipe.logging.progress else None
        if make_bar:
            self._bar = make_bar(
                total=total_steps,
                initial=position.step,
                leave=False,
                bar_format="{desc} {bar}",
            )
            self._bar.set_description_str(f"epoch {self._epoch}/{self.recipe.epochs}  starting")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log values by their TensorBoard tags at an optimizer step."""
        if self._events:
            with report_write_errors(self.path):
                tagged = values
                if self._has_old_tags:
                    tagged = rename_as_before(values, self._metric)
                self._events.scalars(tagged, step)
        if self._loggers:
            self._loggers.scalars(values, step)

    def show(self, summary: Any, step: int) -> None:
        """Log a TensorBoard summary that is not a scalar, for example a picture."""
        if self._events:
            with report_write_errors(self.path):
                self._events.add(summary, step)

    def step(self, row: Mapping[str, Any]) -> None:
        """Write a row of steps.csv."""
        if self._steps:
            # While this run was suspended, another run may have claimed the folder.
            self.folder.check()
            with report_write_errors(self.path):
                self._steps.add(row)

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Write a row of epochs.csv."""
        if self._epochs:
            self.folder.check()
            with report_write_errors(self.path):
                self._epochs.add(row)

    def progress(
        self,
        step: int,
        epoch: int,
        loss: float,
        speed: float | None,
    ) -> None:
        """Update the progress display.

        This is called about once a second, or after every step if steps take longer.

        Args:
            step: Number of steps done.
            epoch: Current epoch, counted from 1.
            loss: Latest training loss.
            speed: Latest images per second, if measured.
        """
        self._epoch = epoch
        self.journal.mark(step)
        if self._paced is None:
            self._paced = (step, time.perf_counter())
        rate = f"{speed:,.0f} images/s" if speed else ""
        remaining = self._estimate_left(step)
        if remaining:
            remaining += f" {self._left}"
        self._state(f"step {step}/{self._total}", f"loss {loss:.4f}", rate, remaining, step=step)

    def _estimate_left(self, step: int) -> str:
        """Estimate the time until the end of the run, as "12:34"; "" if no steps were timed yet.

        Only steps after the first call of `progress` count, because earlier ones include start-up.
        The time is limited by max_time.
        """
        if self._paced is None or step <= self._paced[0]:
            return ""
        first, begun = self._paced
        now = time.perf_counter()
        seconds = (now - begun) / (step - first) * (self._total - step)
        if self.recipe.max_time is not None:
            limit = parse_duration(self.recipe.max_time) or math.inf
            seconds = min(seconds, max(0.0, self._ledger.run_start + limit - now))
        return str(tqdm.format_interval(seconds))

    def evaluating(
        self,
        done: int,
        total: int,
        speed: float,
    ) -> None:
        """Update the progress display during evaluation.

        Args:
            done: Number of evaluated batches.
            total: Number of all batches.
            speed: Images per second.
        """
        self.journal.mark()
        self._state(f"evaluating {done}/{total}", f"{speed:,.0f} images/s")

    def _state(self, *parts: str, step: int | None = None) -> None:
        """Show the state in the progress bar, or print it as a line if there is no bar.

        This does nothing if logging.progress is false. It also does nothing if the last update was
        less than LIVE seconds ago or, without a bar, less than LINE_SECONDS seconds ago.

        Args:
            parts: Strings to show next to each other. Empty strings are left out.
            step: Number of steps done, for the bar.
        """
        now = time.perf_counter()
        interval = LINE_SECONDS if self._bar is None else LIVE
        if not self.recipe.logging.progress or now - self._spoke < interval:
            return
        self._spoke = now
        texts = [f"epoch {self._epoch}/{self.recipe.epochs}", *filter(None, parts)]
        text = "  ".join(texts)
        if self._bar is None:
            self.say(text)
            return
        # If the bar has too little space, drop figures that the rows of the epochs show, too.
        while len(text) + 1 + MIN_BAR > terminal_width() and len(texts) > 3:
            del texts[-2]
            text = "  ".join(texts)
        if step is not None:
            self._bar.n = step
        self._bar.set_description_str(text)

    def result(self, result: Mapping[str, Any]) -> None:
        """Replace result.json, and set the result that the loggers send when they are closed."""
        self.folder.write_result(result)
        if self._loggers:
            self._loggers.result(result)

    def compare(self, result: Mapping[str, Any], figures: Sequence[str]) -> None:
        """Log the keys and figures of a completed run for TensorBoard's HPARAMS tab.

        Args:
            result: Content of result.json.
            figures: Names of the final figures to log. Figures without a value are left out.
        """
        values = {"recipe": self.recipe.name, **self._own_values}
        final = collect_final_figures(result)
        shown = {name: final[name] for name in figures if name in final}
        self.show(hparams_summary(values, shown, result["seconds"]), result["steps"])

    def keep(self, name: str, text: Callable[[], str]) -> None:
        """Write a text file into the run folder unless it exists."""
        if not (self.path / name).exists():
            self.replace(name, text())

    def replace(self, name: str, text: str) -> None:
        """Write a text file into the run folder, or replace it."""
        with report_write_errors(self.path):
            write_atomically(self.path / name, text)

    def flush(self) -> None:
        """Write the tables and TensorBoard's values to disk, so that they match a checkpoint."""
        with report_write_errors(self.path):
            for file in (self._steps, self._epochs, self._events):
                if file:
                    file.sync()

    def close(self) -> None:
        """Close the loggers, the progress bar and all files, and release the run folder."""
        files = (self._loggers, self._bar, self._steps, self._epochs, self._events)
        self._bar = self._steps = self._epochs = self._events = self._loggers = None
        # The ExitStack closes all files even if one of them fails because the disk is full.
        with ExitStack() as closing:
            closing.callback(self.folder.close)
            closing.callback(self.journal.close)
            closing.enter_context(report_write_errors(self.path))
            for part in files:
                if part is not None:
                    closing.callback(part.close)


def choose_bar() -> Any:
    """Return a function that creates a progress bar as `tqdm` does; None if no bar can be shown.

    In a terminal, the bar is a thick line for the finished part, and a thin one for the rest.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and "IPKernelApp" in shell.config:
        from tqdm import notebook

        # Without ipywidgets, tqdm.notebook can be imported, but fails when a bar is created.
        if getattr(notebook, "IProgress", None) is not None:
            return notebook.tqdm
    elif not can_overwrite(sys.stderr):
        return None
    is_unicode = "utf" in (sys.stderr.encoding or "").lower()
    return partial(tqdm, ascii="─━" if is_unicode else "-#", dynamic_ncols=True)


class Progress:
    """Progress of work before the first step: a bar on a terminal, otherwise lines at intervals."""

    def __init__(
        self, total: int, show: bool, what: str, unit: str, first: float = SECONDS
    ) -> None:
        """Start the display.

        Args:
            total: Number of items.
            show: Whether to show anything.
            what: Description of the work.
            unit: Singular noun for an item.
            first: Seconds until the first line.
        """
        self._bar: Any = None
        make_bar = choose_bar() if show and total else None
        if make_bar:
            form = f"{{desc}}  {{n_fmt}}/{{total_fmt}} {unit}s  {{remaining}} left {{bar}}"
            self._bar = make_bar(total=total, desc=what, leave=False, bar_format=form)
        self._show = show
        self._total = total
        self._done = 0
        self._what = what
        self._unit = unit
        self._start = time.monotonic()
        self._next = self._start + first

    def advance(self, count: int = 1) -> None:
        """Count `count` more items as done."""
        self.set_remaining(self._total - self._done - count)

    def is_due(self) -> bool:
        """Return whether the display should be updated now; False if nothing is shown."""
        return self._show and time.monotonic() >= self._next

    def set_remaining(self, count: int) -> None:
        """Set the number of items that are not done yet."""
        new = self._total - count - self._done
        self._done = self._total - count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(new)
            self._next = now + EARLY_BAR_SECONDS
        elif self._show and now >= self._next and self._done and count:
            self._next = now + SECONDS
            seconds = count * (now - self._start) / self._done
            print(
                f"  {self._what}: {self._done:,} of {self._total:,} {self._unit}s, about "
                f"{format_duration(seconds)} left",
                flush=True,
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

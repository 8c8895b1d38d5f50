"""Watching a run: progress bar or plain lines, TensorBoard, steps.csv, result.json; and the null twin of all that.

Rank 0 has a `Tracker`; every other rank the `NullTracker`, so nobody asks which rank it is.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trainer.checkpoint import Position
from trainer.recipe import Recipe, flatten
from trainer.run_folder import RunFolder, StepsFile

SPEED_CHARTS = {
    "speed": {
        "samples per second": ["Multiline", ["speed/samples_per_sec", "speed/samples_per_sec_per_device"]],
        "step time, ms": ["Multiline", ["speed/step_ms"]],
        "waiting for data, %": ["Multiline", ["speed/data_wait_pct"]],
    }
}


PIPELINE_CHARTS = {
    "pipeline": {
        "bubble, %": ["Multiline", ["pipeline/bubble_pct", "pipeline/bubble_predicted_pct"]],
        "stages at work, %": ["Multiline", ["pipeline/stage.*"]],
    }
}


class NullTracker:
    """Does nothing, for ranks that have no run folder."""

    path: Path | None = None

    def say(self, text: str) -> None:
        """Print a line."""

    def start(self, position: Position, total_steps: int) -> None:
        """Training begins here, and goes on to so many steps."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """TensorBoard values; tags as in the design, x is the optimizer step."""

    def text(self, tag: str, text: str) -> None:
        """Markdown for TensorBoard's text tab."""

    def step(self, row: Mapping[str, Any]) -> None:
        """A logged step: a row of steps.csv."""

    def progress(self, step: int, epoch: int) -> None:
        """Training has come this far; called about once a second, or after every step that takes longer."""

    def evaluating(self, done: int, total: int) -> None:
        """Evaluation is at batch `done` of `total`."""

    def result(self, result: Mapping[str, Any]) -> None:
        """Replace result.json."""

    def known(self) -> dict[str, Any]:
        """What an earlier part of the run measured to choose how to run."""
        return {}

    def remember(self, known: Mapping[str, Any]) -> None:
        """Keep it for later parts."""

    def previous_result(self) -> dict[str, Any]:
        """result.json of an earlier part of the run, empty where there is none."""
        return {}

    def flush(self) -> None:
        """Everything logged so far is in its file: a checkpoint is as old."""

    def close(self) -> None:
        """Flush and close every file."""


class Tracker(NullTracker):
    """The run folder's writer."""

    def __init__(self, recipe: Recipe, folder: RunFolder) -> None:
        self.recipe = recipe
        self.folder = folder
        self.path = folder.path
        self._bar: Any = None
        self._steps: StepsFile | None = None
        self._events: Any = None
        self._spoke = 0.0
        self._news = ""  # the latest loss and speed
        self._interactive = recipe.logging.progress and sys.stderr.isatty()

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
            return
        with suppress(BrokenPipeError):  # `| head` has read enough; the run goes on
            print(text, flush=True)

    def start(self, position: Position, total_steps: int) -> None:
        self.folder.write_recipe(self.recipe)
        self._steps = StepsFile(self.folder.path, position.step)
        self._total = total_steps
        self._begun, self._first = time.perf_counter(), position.step
        if self.recipe.logging.tensorboard:
            self._open_events(position)
        if self._interactive:
            self._bar = tqdm(
                total=total_steps, initial=position.step, unit="step", dynamic_ncols=True, leave=False, mininterval=0.2,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            )  # fmt: skip

    def _open_events(self, position: Position) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        trim_events(self.folder.path, position)
        self._events = SummaryWriter(str(self.folder.path), flush_secs=10)
        if position.step == 0:
            self._events.add_text("recipe", "```yaml\n" + self.recipe.to_yaml() + "```", 0)
            pipeline = PIPELINE_CHARTS if self.recipe.mode == "pipeline" else {}
            self._events.add_custom_scalars({**SPEED_CHARTS, **pipeline})
            plain = {key: _plain(value) for key, value in flatten(self.recipe.to_dict()).items()}
            for summary in hparams(plain, {"val/top1": 0.0, "val/loss": 0.0}):  # type: ignore[no-untyped-call]
                self._events.file_writer.add_summary(summary)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        if self._events is not None:
            # One event for all of them: an event each would cost several times as much.
            from tensorboard.compat.proto.summary_pb2 import Summary

            entries = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            self._events.file_writer.add_summary(Summary(value=entries), step)

    def text(self, tag: str, text: str) -> None:
        if self._events is not None and self._first == 0:
            self._events.add_text(tag, text, 0)

    def step(self, row: Mapping[str, Any]) -> None:
        if self._steps is not None:
            self._steps.add(row)
        self._news = f", loss {row['train_loss']:.4f}"
        self._news += f", {row['samples_per_sec']:,.0f} images/s" if row["samples_per_sec"] else ""

    def progress(self, step: int, epoch: int) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(f"epoch {epoch}{self._news}", refresh=False)
            self._bar.update(step - self._bar.n)
        elif self.recipe.logging.progress and time.perf_counter() - self._spoke > 5:
            self._spoke = time.perf_counter()
            left = (self._spoke - self._begun) / max(1, step - self._first) * (self._total - step)
            self.say(f"step {step}/{self._total}, epoch {epoch}{self._news}, {_duration(left)} left")

    def evaluating(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(f"evaluating {done}/{total}", refresh=False)
            self._bar.update(0)

    def result(self, result: Mapping[str, Any]) -> None:
        self.folder.write_result(result)

    def known(self) -> dict[str, Any]:
        return self.folder.known()

    def remember(self, known: Mapping[str, Any]) -> None:
        self.folder.remember(known)

    def previous_result(self) -> dict[str, Any]:
        return self.folder.previous_result()

    def flush(self) -> None:
        if self._steps is not None:
            self._steps.flush()
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        if self._events is not None:
            self._events.close()
            self._events = None
        self.folder.close()


def trim_events(folder: Path, position: Position) -> None:
    """Rewrite a continued run's TensorBoard files into one that ends at `position`: one value a (tag, step).

    In the middle of an epoch, or before its evaluation, what that will log at this step is still to come.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.summary.writer.record_writer import RecordWriter

    def stays(event: Any) -> bool:
        if event.step != position.step or position.step_in_epoch == 0:
            return position.step > 0 and bool(event.step <= position.step)
        return not any(value.tag.startswith(("val/", "memory/")) for value in event.summary.value)

    old = sorted(folder.glob("events.out.tfevents.*"))
    if not old:
        return
    target = folder / f"trimmed.{old[0].name}"
    with target.open("wb") as file:
        writer = RecordWriter(file)
        for path in old:
            for event in LegacyEventFileLoader(str(path)).Load():
                if stays(event):
                    writer.write(event.SerializeToString())
    for path in old:
        path.unlink()
    shutil.move(target, folder / old[0].name)


def without_nan(value: Any) -> Any:
    """JSON knows no NaN: they become null."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> bool | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"

"""Watching a prediction: a bar or plain lines with each device's speed, and TensorBoard."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trainer.commands.predict.rows import writing_rows
from trainer.devices.assignment import numbered
from trainer.pool import DevicePool
from trainer.processes.terminal import rewrites
from trainer.recipe import LoggingRecipe
from trainer.telemetry.events import Events
from trainer.telemetry.readable import counted

SECONDS = 1.0  # between two looks at the pool
SPOKEN = 5.0  # between two lines where there is no terminal


class Watch:
    """Looks at the pool about once a second."""

    def __init__(
        self, folder: Path, count: int | None, logging: LoggingRecipe, devices: Sequence[str], speaks: bool
    ) -> None:
        """`count` images are to come; only the rank that `speaks` shows a bar."""
        self._folder = folder
        self._names, self._count, self._done = list(numbered(devices)), count, 0
        self._looked = self._spoke = self._begun = time.monotonic()
        terminal = rewrites(sys.stderr)
        self._plain = speaks and logging.progress and not terminal
        self._bar: Any = None
        self._events: Any = None
        if not speaks:
            return
        if logging.progress and terminal:
            self._bar = tqdm(total=count, unit="image", smoothing=0.1, dynamic_ncols=True)
        if logging.tensorboard:
            with writing_rows(folder):
                self._events = Events(folder)
            what = "images as they come" if count is None else counted(count, "image")
            print(f"predicting {what} on {', '.join(self._names)}", flush=True)

    def note(self, pool: DevicePool) -> None:
        """One more image is labelled."""
        self._done += 1
        now = time.monotonic()
        if self._done == 1:
            self._begun = self._spoke = now
        if now - self._looked < SECONDS:
            return
        self._looked = now
        figures = list(zip(self._names, pool.figures(), strict=True))
        speeds = ", ".join(f"{name} {values['items_per_sec']:,.0f}/s" for name, values in figures)
        if self._bar is not None:
            self._bar.set_postfix_str(speeds, refresh=False)
            self._move_bar()
        elif self._plain and now - self._spoke > SPOKEN:
            self._spoke = now
            left = ""
            if self._count is not None:
                seconds = (now - self._begun) / (self._done - 1) * (self._count - self._done)
                left = f" of {self._count:,}, {tqdm.format_interval(seconds)} left"
            print(f"{self._done:,}{left}; {speeds}", flush=True)
        if self._events is not None:
            tags = ("items_per_sec", "queue", "batch_size")
            scalars = {f"predict/{name}/{tag}": values[tag] for name, values in figures for tag in tags}
            with writing_rows(self._folder):
                self._events.scalars(scalars, self._done)

    def close(self) -> None:
        if self._bar is not None:
            self._move_bar()
            self._bar.close()
        if self._events is not None:
            with writing_rows(self._folder):
                self._events.close()

    def _move_bar(self) -> None:
        self._bar.update(self._done - self._bar.n)

"""Watching a prediction: a bar or plain lines with each device's speed, and TensorBoard."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trainer.devices import numbered
from trainer.pool import DevicePool
from trainer.recipe import LoggingRecipe

SECONDS = 1.0  # between two looks at the pool
SPOKEN = 5.0  # between two lines where there is no terminal


class Watch:
    """Looks at the pool about once a second."""

    def __init__(
        self, folder: Path, count: int | None, logging: LoggingRecipe, devices: Sequence[str], speaks: bool, done: int
    ) -> None:
        """`count` images are to come after `done` of an earlier command; only the rank that `speaks` shows a bar."""
        self._names, self._count, self._done = list(numbered(devices)), count, 0
        self._looked = self._spoke = self._begun = time.monotonic()
        self._plain = speaks and logging.progress and not sys.stderr.isatty()
        self._bar: Any = None
        if speaks and logging.progress and sys.stderr.isatty():
            total = None if count is None else count + done
            self._bar = tqdm(total=total, initial=done, unit="image", smoothing=0.1, dynamic_ncols=True)
        self._events: Any = None
        if speaks and logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder))
        if speaks:
            whole = "images as they come" if count is None else f"{count:,} images"
            again = f", after {done:,} that were labelled before" if done else ""
            print(f"predicting {whole}{again} on {', '.join(self._names)}", flush=True)

    def note(self, pool: DevicePool) -> None:
        """One more image is labelled."""
        self._done += 1
        now = time.monotonic()
        if self._done == 1:
            self._begun = self._spoke = now
        if now - self._looked < SECONDS:
            return
        self._looked = now
        figures = pool.figures()
        speeds = ", ".join(
            f"{name} {found['items_per_sec']:,.0f}/s" for name, found in zip(self._names, figures, strict=True)
        )
        if self._bar is not None:
            self._bar.set_postfix_str(speeds, refresh=False)
            self._bar.update(self._done - (self._bar.n - self._bar.initial))
        elif self._plain and now - self._spoke > SPOKEN:
            self._spoke = now
            left = ""
            if self._count is not None:
                seconds = (now - self._begun) / (self._done - 1) * (self._count - self._done)
                left = f" of {self._count:,}, {tqdm.format_interval(seconds)} left"
            print(f"{self._done:,}{left}; {speeds}", flush=True)
        if self._events is not None:
            for name, found in zip(self._names, figures, strict=True):
                for key, tag in (("items_per_sec", "items_per_sec"), ("queue", "queue"), ("batch_size", "batch_size")):
                    self._events.add_scalar(f"predict/{name}/{tag}", found[key], self._done)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.update(self._done - (self._bar.n - self._bar.initial))
            self._bar.close()
        if self._events is not None:
            self._events.close()

"""When stages worked: the spans of the last few steps, on the clock of the CPU or by events on a GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trainer.modes.pipeline.orders import Action, Span
from trainer.telemetry.clocks import record_event

KEPT = 8  # steps between two looks
Moment = tuple[float, Any]  # when the host was there, and the CUDA event that it recorded


class Recorder:
    """Records the actions of the steps since the last look; nothing here waits for a device before `steps`."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.cuda = devices[0].type == "cuda"
        self._devices = [device.index for device in dict.fromkeys(devices)] if self.cuda else []
        self._steps: deque[list[tuple[int, Action, int, Moment, Moment]]] = deque(maxlen=KEPT)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step, or a piece of it."""
        self._steps.append([])
        yield

    @contextmanager
    def action(self, worker: int, action: Action) -> Iterator[None]:
        """An action within the step, issued to the current stream of the current device."""
        begin = self._mark()
        yield
        if self._steps:
            index = torch.cuda.current_device() if self.cuda else 0
            self._steps[-1].append((worker, action, index, begin, self._mark()))

    def _mark(self) -> Moment:
        if not self.cuda:
            return time.perf_counter(), None
        event = record_event()
        return time.perf_counter(), event

    def steps(self) -> list[list[Span]]:
        """Each step's spans, which are forgotten: seconds on `time.perf_counter`'s clock; waits for the devices."""
        now = {index: self._now(index) for index in self._devices}
        steps = [[self._span(now, *marks) for marks in step] for step in self._steps]
        self._steps.clear()
        return [spans for spans in steps if spans]

    def _now(self, index: int) -> Moment:
        """One moment on the CPU's clock and, as an event, on an idle device's."""
        torch.cuda.synchronize(index)
        with torch.cuda.device(index):
            _, event = self._mark()
        moment = time.perf_counter()
        event.synchronize()
        return moment, event

    def _span(
        self, now: dict[int, Moment], worker: int, action: Action, index: int, begin: Moment, end: Moment
    ) -> Span:
        if not self.cuda:
            return Span(worker, action, begin[0], end[0])
        moment, event = now[index]
        start, stop = (moment - mark.elapsed_time(event) / 1e3 for _, mark in (begin, end))
        return Span(worker, action, start, stop, max(0.0, min(stop, end[0]) - max(start, begin[0])))

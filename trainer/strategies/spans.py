"""When stages worked: the spans of the last few steps, on the clock of the CPU or by events on a GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.strategies.orders import Span, Task

KEPT = 8  # steps between two looks


@dataclass
class _Step:
    begun: float
    origins: dict[int, Any]  # a CUDA event at its begin on each device
    marks: list[tuple[int, Task, int, Any, Any]] = field(default_factory=list)


class Recorder:
    """Records the tasks of the steps since the last look; nothing here waits for a device before `steps`."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.cuda = devices[0].type == "cuda"
        self._devices = [device.index for device in dict.fromkeys(devices)] if self.cuda else []
        self._steps: deque[_Step] = deque(maxlen=KEPT)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step, or a piece of it."""
        origins = {}
        for index in self._devices:
            with torch.cuda.device(index):
                origins[index] = self._mark()
        self._steps.append(_Step(time.perf_counter(), origins))
        yield

    @contextmanager
    def task(self, worker: int, task: Task) -> Iterator[None]:
        """A task within the step, issued to the current stream of the current device."""
        begin = self._mark()
        yield
        if self._steps:
            index = torch.cuda.current_device() if self.cuda else 0
            self._steps[-1].marks.append((worker, task, index, begin, self._mark()))

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def steps(self) -> list[list[Span]]:
        """Each step's spans, which are forgotten: seconds on `time.perf_counter`'s clock; waits for the devices."""
        found = []
        for step in self._steps:
            found.append([self._span(step, *mark) for mark in step.marks])
        self._steps.clear()
        return [spans for spans in found if spans]

    def _span(self, step: _Step, worker: int, task: Task, index: int, begin: Any, end: Any) -> Span:
        if not self.cuda:
            return Span(worker, task, begin, end)
        end.synchronize()
        origin = step.origins[index]
        start, stop = (step.begun + origin.elapsed_time(mark) / 1e3 for mark in (begin, end))
        return Span(worker, task, start, stop)

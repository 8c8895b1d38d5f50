"""When stages worked, on the clock of the CPU or by events on a GPU: recorded, written for Perfetto, drawn."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainer.modes.pipeline.orders import Action, Span, idle_share
from trainer.saving.files import write_atomically
from trainer.telemetry import plots
from trainer.telemetry.clocks import record_event

KEPT = 8  # steps between two looks
Moment = tuple[float, Any]  # when the host was there, and the CUDA event that it recorded
NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
COLOURS = dict(zip(NAMES, plots.COLOURS, strict=False))


class Recorder:
    """Records the actions of the steps since the last look; nothing here waits for a device before `steps`."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.cuda = devices[0].type == "cuda"
        self._devices = [device.index for device in dict.fromkeys(devices)] if self.cuda else []
        self._steps: deque[list[tuple[int, Action, int, Moment, Moment]]] = deque(maxlen=KEPT)
        self._on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """What is done in here is not recorded: an event in a CUDA graph tells no time."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step, or a piece of it."""
        if self._on:
            self._steps.append([])
        yield

    @contextmanager
    def action(self, worker: int, action: Action) -> Iterator[None]:
        """An action within the step, issued to the current stream of the current device."""
        if not self._on:
            yield
            return
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


def write(folder: Path, steps: Sequence[Sequence[Span]]) -> None:
    """timeline.json with all steps and timeline.png with the last one."""
    write_atomically(folder / "timeline.json", json.dumps(trace_events(steps)) + "\n")
    picture(folder / "timeline.png", steps[-1])


def trace_events(steps: Sequence[Sequence[Span]]) -> dict[str, Any]:
    """The Trace Event Format's complete events, times in microseconds: a process a worker, a thread a stage."""
    origin = min(span.begin for spans in steps for span in spans)
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": worker, "args": {"name": f"worker {worker}"}}
        for worker in sorted({span.worker for spans in steps for span in spans})
    ]
    for step, spans in enumerate(steps):
        for worker, (kind, stage, microbatch), begin, end, _ in spans:
            events.append(
                {
                    "name": f"{kind}{microbatch}",
                    "cat": NAMES[kind],
                    "ph": "X",
                    "ts": 1e6 * (begin - origin),
                    "dur": 1e6 * (end - begin),
                    "pid": worker,
                    "tid": stage,
                    "args": {"stage": stage, "microbatch": microbatch, "step": step},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def title(spans: Sequence[Span], workers: int) -> str:
    """What a step's picture says above: how much of it is empty, and how much may be."""
    bubble, most = idle_share(spans, workers), idle_share(spans, workers, launching=True)
    idle = f"{bubble:.0%}" + (f" (or up to {most:.0%}, if GPUs waited for launches)" if most > bubble + 0.01 else "")
    return f"one training step; numbers are micro-batches; in this step the workers idle {idle} of the time"


def picture(path: Path, spans: Sequence[Span]) -> None:
    """One step: a row a stage, a bar an action with its micro-batch's number; what is empty is idle."""
    from matplotlib.patches import Patch

    origin, length = min(span.begin for span in spans), max(span.end for span in spans)
    length -= origin
    workers = {span.action.stage: span.worker for span in spans}
    rows = sorted(workers, key=lambda stage: (workers[stage], stage))
    figure, (axes,) = plots.canvas(12, 1.2 + 0.6 * len(rows))
    axes.grid(False)
    for _, (kind, stage, microbatch), begin, end, _ in spans:
        row, start, width = rows.index(stage), 1e3 * (begin - origin), 1e3 * (end - begin)
        axes.broken_barh(
            [(start, width)], (row - 0.4, 0.8), facecolor=COLOURS[kind], edgecolor=plots.INK, linewidth=0.5
        )
        if end - begin > 0.015 * length:
            axes.text(start + width / 2, row, str(microbatch), ha="center", va="center", fontsize=8, color="white")
    axes.set_yticks(range(len(rows)), [f"worker {workers[stage]}, stage {stage}" for stage in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * length)
    axes.set_xlabel("ms")
    axes.set_title(title(spans, len(set(workers.values()))), color=plots.INK)
    kinds = [kind for kind in COLOURS if any(span.action.kind == kind for span in spans)]
    handles = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), frameon=False, labelcolor=plots.INK)
    plots.save_picture(figure, path)

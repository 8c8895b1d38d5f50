"""Recording of the times at which stages work, as timeline.json for Perfetto and as a picture.

Times come from the CPU's clock or from GPU events.
"""

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainer.modes.pipeline.orders import Action, Span, compute_idle_share, measure_length
from trainer.saving.files import write_atomically
from trainer.telemetry import plots
from trainer.telemetry.clocks import record_event

# Maximum number of steps that a recorder keeps. Older steps are deleted.
KEPT = 8
# Time of the host's clock, and the CUDA event that was recorded at that time (None on a CPU).
Moment = tuple[float, Any]
NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
COLOURS = dict(zip(NAMES, plots.COLOURS, strict=False))


class Recorder:
    """Recorder of the actions of the latest `KEPT` steps since the last call of `steps`.

    Only the method `steps` waits for a device.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.cuda = devices[0].type == "cuda"
        self._devices = []
        if self.cuda:
            self._devices = [device.index for device in dict.fromkeys(devices)]
        self._steps: deque[list[tuple[int, Action, int, Moment, Moment]]] = deque(maxlen=KEPT)
        self._is_on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Return a context in which nothing is recorded.

        Captures use it, because the time of an event in a CUDA graph is not known.
        """
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return a context whose actions become one entry of `steps`.

        A step that accumulates gradients over several passes has one entry for each pass.
        """
        if self._is_on:
            self._steps.append([])
        yield

    @contextmanager
    def action(
        self,
        worker: int,
        action: Action,
    ) -> Iterator[None]:
        """Return a context that records the time of its operations as `action`.

        The operations must be issued to the current stream of the current device.
        """
        if not self._is_on:
            yield
            return
        begin = self._mark()
        yield
        if self._steps:
            index = torch.cuda.current_device() if self.cuda else 0
            end = self._mark()
            self._steps[-1].append((worker, action, index, begin, end))

    def _mark(self) -> Moment:
        if not self.cuda:
            return time.perf_counter(), None
        event = record_event()
        return time.perf_counter(), event

    def steps(self) -> list[list[Span]]:
        """Return the spans of each recorded step, and delete them. Waits for the devices.

        Times are in seconds of `time.perf_counter`.
        """
        now = {index: self._now(index) for index in self._devices}
        steps = [[self._span(now, *mark) for mark in marks] for marks in self._steps if marks]
        self._steps.clear()
        return steps

    def _now(self, index: int) -> Moment:
        """Return one moment as a time of the host's clock and as an event of the idle device."""
        torch.cuda.synchronize(index)
        with torch.cuda.device(index):
            _, event = self._mark()
        moment = time.perf_counter()
        event.synchronize()
        return moment, event

    def _span(
        self,
        now: dict[int, Moment],
        worker: int,
        action: Action,
        index: int,
        begin: Moment,
        end: Moment,
    ) -> Span:
        if not self.cuda:
            return Span(worker, action, begin[0], end[0])
        moment, event = now[index]
        host_begin, begin_event = begin
        host_end, end_event = end
        start = moment - begin_event.elapsed_time(event) / 1e3
        stop = moment - end_event.elapsed_time(event) / 1e3
        # Time in which the host was still launching the action while the device worked on it.
        launching = max(0.0, min(stop, host_end) - max(start, host_begin))
        return Span(worker, action, start, stop, launching)


def write(folder: Path, steps: Sequence[Sequence[Span]]) -> None:
    """Write timeline.json with all steps and timeline.png with the last step."""
    write_atomically(folder / "timeline.json", json.dumps(trace_events(steps)) + "\n")
    draw_step(folder / "timeline.png", steps[-1])


def trace_events(steps: Sequence[Sequence[Span]]) -> dict[str, Any]:
    """Convert steps to complete events of the Trace Event Format, with times in microseconds.

    Each worker is a process of the trace, and each stage a thread.
    """
    all_spans = [span for spans in steps for span in spans]
    origin = min(span.begin for span in all_spans)
    events = []
    for worker in sorted({span.worker for span in all_spans}):
        name = {"name": f"worker {worker}"}
        events.append({"name": "process_name", "ph": "M", "pid": worker, "args": name})
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


def format_title(spans: Sequence[Span], workers: int) -> str:
    """Format the title of a step's picture, with the bubble and its upper bound."""
    bubble = compute_idle_share(spans, workers)
    at_most = compute_idle_share(spans, workers, launching=True)
    idle = f"{bubble:.0%}"
    if at_most > bubble + 0.01:
        idle += f" (or up to {at_most:.0%}, if GPUs waited for launches)"
    return (
        "one training step; numbers are micro-batches; in this step the workers idle "
        f"{idle} of the time"
    )


def draw_step(path: Path, spans: Sequence[Span]) -> None:
    """Draw one step: one row per stage, and one bar per action with its micro-batch's number.

    A worker is idle where all of its rows are empty.
    """
    from matplotlib.patches import Patch

    origin = min(span.begin for span in spans)
    length = measure_length(spans)
    workers = {span.action.stage: span.worker for span in spans}
    rows = sorted(workers, key=lambda stage: (workers[stage], stage))
    figure, (axes,) = plots.create_figure(12, 1.2 + 0.6 * len(rows))
    axes.grid(False)
    for _, (kind, stage, microbatch), begin, end, _ in spans:
        row = rows.index(stage)
        start = 1e3 * (begin - origin)
        width = 1e3 * (end - begin)
        axes.broken_barh(
            [(start, width)],
            (row - 0.4, 0.8),
            facecolor=COLOURS[kind],
            edgecolor=plots.INK,
            linewidth=0.5,
        )
        # The number does not fit into a narrower bar.
        if end - begin > 0.015 * length:
            axes.text(
                start + width / 2,
                row,
                str(microbatch),
                ha="center",
                va="center",
                fontsize=8,
                color="white",
            )
    axes.set_yticks(range(len(rows)), [f"worker {workers[stage]}, stage {stage}" for stage in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * length)
    axes.set_xlabel("ms")
    worker_count = len(set(workers.values()))
    axes.set_title(format_title(spans, worker_count), color=plots.INK)
    drawn_kinds = {span.action.kind for span in spans}
    handles = [
        Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in NAMES if kind in drawn_kinds
    ]
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
        labelcolor=plots.INK,
    )
    plots.save_picture(figure, path)

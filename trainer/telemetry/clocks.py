"""Clocks for steps, for throughput, and for the activities of a process.

Functions that are called within a step never wait for a device.
"""

import time
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from trainer.saving.journal import DATA, START, STEPS, UNFINISHED

# Activity in a `Ledger`: waiting for the first batches while the loader workers start.
FIRST = f"{START}first batches"


def synchronise(devices: Sequence[torch.device]) -> None:
    """Wait until the devices have finished all work in their queues."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def record_event() -> torch.cuda.Event:
    """Record a CUDA event that measures time on the current stream, and return it."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass(frozen=True)
class Throughput:
    """Images per second.

    Attributes:
        samples_per_sec: Mean over all measured windows, or over all steps if there are fewer than
            two windows.
        std: Standard deviation over the same windows or steps, weighted by their durations; None
            for a single step.
    """

    samples_per_sec: float
    std: float | None


@dataclass(frozen=True)
class StepTime:
    """Statistics of the durations of steps, in seconds.

    Attributes:
        mean: Mean of all steps.
        std: Standard deviation; None for a single step.
        p95: 95th percentile of the last million steps.
    """

    mean: float
    std: float | None
    p95: float


@dataclass(frozen=True)
class Speed:
    """Speed of a run. The attributes are keys of result.json; None if a value was not measured.

    Attributes:
        throughput: Images per second.
        step_time_s: Statistics of the durations of steps.
        data_wait_fraction: Fraction of the steps' time that was spent waiting for data.
        launch_bound_fraction: Upper bound of the fraction of the steps' time in which a GPU waited
            for kernel launches (see `StepTimer`); None without a GPU.
        short: Whether the run ended within its warm-up.
    """

    throughput: Throughput | None = None
    step_time_s: StepTime | None = None
    data_wait_fraction: float | None = None
    launch_bound_fraction: float | None = None
    short: bool = True


class StepTimer:
    """Clock for steps and for waiting for data within them.

    Steps are grouped into windows that end with a synchronization. On CUDA, the host runs ahead of
    the device, so the steps are timed by events on the device. On other devices, they are timed by
    the host's clock. Waiting for data counts only while both host and device wait: if the host
    waits while the device still computes, no time is lost.

    Waiting for kernel launches is detected by comparing two times: when the device ends a step, and
    when the host has launched all kernels of the next step. If the host was earlier, the next step
    does not wait for launches, and its duration is that of the device's work alone. If the device
    was earlier, it may wait until the last kernel is launched. No event shows for how much of this
    time the device waits, so only an upper bound is known. The bound is the smaller of two times:
    the time from the device's arrival at the step to the last launch, and the excess of the step's
    duration over the shortest step that did not wait for launches. Both exclude waiting for data.
    """

    # On CUDA, the optimizer is timed only once in this number of steps, because recording an event
    # costs microseconds.
    MARKED = 8

    def __init__(self, devices: Sequence[torch.device], warmup: int) -> None:
        """Start the first window.

        Args:
            devices: Devices of this process. A window ends when all of them have finished.
            warmup: Number of steps at the beginning of the run that are not measured.
        """
        self.devices = devices
        self.cuda = devices[0].type == "cuda"
        self.warmup = warmup
        self.seen = 0
        # Seconds of each measured step.
        self.steps = array("d")
        # Seconds of each warm-up step after the first, for runs that have no measured step.
        self.early = array("d")
        # Seconds of waiting for data in [measured steps, warm-up steps].
        self.waits = [0.0, 0.0]
        # Upper bound of the seconds of waiting for launches in [measured steps, warm-up steps].
        self.launches = [0.0, 0.0]
        # Number of steps and seconds of each measured window.
        self.windows: list[tuple[int, float]] = []
        # Number of windows before the latest call of `lap`.
        self._lap = 0
        # Seconds of the optimizer in each step in which it was timed: (measured steps, warm-up
        # steps).
        self.updates: tuple[array[float], array[float]] = (array("d"), array("d"))
        # Upper bound of the fraction of the last window in which the device waited for launches.
        self.latest_launches = 0.0
        # Seconds of the shortest step that did not wait for launches, in the latest window that has
        # such a step.
        self._own = 0.0
        self._events: list[torch.cuda.Event] = []
        # Index of the step in the window, and start of its optimizer.
        self._marks: list[tuple[int, torch.cuda.Event]] = []
        # Index of the step in the window, and start and end of the device's waiting for data.
        self._gaps: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        # Start of the step after a pause, by the index of the step in the window.
        self._resumed: dict[int, torch.cuda.Event] = {}
        self._mark = 0.0
        self._asked = 0.0
        # (end, seconds of waiting for data, seconds of the optimizer) of each step in this window.
        self._pending: list[tuple[float, float, float]] = []
        self.start()

    def start(self) -> None:
        """Start a window. The time since the last window (evaluation, saving) is not measured."""
        self._pending.clear()
        if self.cuda:
            self._marks.clear()
            self._gaps.clear()
            self._resumed.clear()
            self._events = [record_event()]
        self._begun = time.perf_counter()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time of this block from all steps.

        The block must lie between two steps, or before the first pass of a step, and the devices
        must be idle before and after it.
        """
        begun = time.perf_counter()
        yield
        if self.cuda:
            self._resumed[len(self._pending)] = record_event()
        seconds = time.perf_counter() - begun
        self._begun += seconds
        self._pending = [(end + seconds, waited, update) for end, waited, update in self._pending]

    def update(self) -> None:
        """Note that the optimizer starts. It runs until the end of the step."""
        if not self.cuda:
            self._mark = time.perf_counter()
        elif len(self._pending) % self.MARKED == 0:
            self._marks.append((len(self._pending), record_event()))

    def ask(self) -> None:
        """Note that the host asks for a micro-batch.

        Until the micro-batch arrives, the device has no work other than that in its queue.
        """
        if self.cuda:
            first = not self._gaps or self._gaps[-1][0] < len(self._pending)
            latest = self._resumed.get(len(self._pending), self._events[-1])
            self._before = latest if first else record_event()
        self._asked = time.perf_counter()

    def arrive(self) -> float:
        """Note that the micro-batch has arrived, and return the seconds that the host waited."""
        waited = time.perf_counter() - self._asked
        if self.cuda:
            self._gaps.append((len(self._pending), self._before, record_event()))
        return waited

    def step(self, waited: float) -> None:
        """Note that the host has issued a step and waited `waited` seconds for its data."""
        if self.cuda:
            self._events.append(record_event())
        now = time.perf_counter()
        self._pending.append((now, waited, now - self._mark))

    def stop(self) -> tuple[int, float, float]:
        """Synchronize the devices and close the window.

        Returns:
            (steps, seconds, waited): the number of steps in the window, its duration, and the
            seconds of this duration that were spent waiting for data.
        """
        if not self._pending:
            self.start()
            return 0, 0.0, 0.0
        if self.cuda:
            synchronise(self.devices)
            durations = []
            for n, (begin, end) in enumerate(pairwise(self._events)):
                begin = self._resumed.get(n, begin)
                durations.append(begin.elapsed_time(end) / 1e3)
        else:
            ends = [self._begun, *(end for end, _, _ in self._pending)]
            durations = [end - begin for begin, end in pairwise(ends)]
        seconds = time.perf_counter() - self._begun
        waits = [wait for _, wait, _ in self._pending]
        if self._gaps:
            idle = [0.0] * len(waits)
            for step, before, after in self._gaps:
                idle[step] += before.elapsed_time(after) / 1e3
            waits = [*map(min, waits, idle)]
        launches = [0.0] * len(waits)
        if self.cuda:
            launches = self._launches(durations, waits)
        self.latest_launches = sum(launches) / max(sum(durations), 1e-9)
        first = self.seen
        self._note_updates()
        self.seen += len(durations)
        rows = zip(durations, waits, launches, strict=True)
        for number, (duration, wait, launch) in enumerate(rows, first):
            # The first step of a run includes start-up. It counts only in runs without warm-up.
            if number > 0 or not self.warmup:
                early = number < self.warmup
                (self.early if early else self.steps).append(duration)
                self.waits[early] += wait
                self.launches[early] += launch
        if first >= self.warmup:
            self.windows.append((len(durations), seconds))
        self.start()
        return len(durations), seconds, sum(waits)

    def _launches(
        self,
        durations: Sequence[float],
        waits: Sequence[float],
    ) -> list[float]:
        """Return upper bounds of the seconds that the device waited for launches in each step.

        All times are on the host's clock. The device's times are converted from the start of the
        window, where the device is idle and reaches an event as soon as it is recorded.
        """
        # Seconds in which the device had reached the step while the host was still launching it.
        exposed = []
        unexposed = []
        reached = self._begun
        before = self._begun
        steps = zip(self._pending, durations, waits, strict=True)
        for (issued, waited, _), duration, wait in steps:
            # Part of the host's waiting for data that lies after the device reached the step.
            waited_since = max(wait, waited - max(0.0, reached - before))
            launch = max(0.0, issued - reached - waited_since)
            exposed.append(launch)
            if launch == 0:
                unexposed.append(duration)
            reached = reached + duration
            before = issued
        self._own = min(unexposed, default=self._own)
        return [
            min(launch, max(0.0, duration - wait - self._own))
            for launch, duration, wait in zip(exposed, durations, waits, strict=True)
        ]

    def lap(self) -> tuple[int, float]:
        """Return the number and total seconds of the steps measured since the last call."""
        fresh = self.windows[self._lap :]
        self._lap = len(self.windows)
        return sum(steps for steps, _ in fresh), sum(seconds for _, seconds in fresh)

    def _note_updates(self) -> None:
        if self.cuda:
            updates = [(n, mark.elapsed_time(self._events[n + 1]) / 1e3) for n, mark in self._marks]
        else:
            updates = [(n, seconds) for n, (_, _, seconds) in enumerate(self._pending)]
        for n, seconds in updates:
            number = self.seen + n
            if number > 0:
                self.updates[number < self.warmup].append(seconds)

    def update_seconds(self) -> float:
        """Return the mean seconds of the optimizer per step, over the steps of `summary`."""
        updates = self.updates[not self.steps]
        return sum(updates) / max(1, len(updates))

    def summary(self, batch_size: float) -> Speed:
        """Return the speed over all measured windows.

        If the run ended within its warm-up, no window was measured, and the speed is that of all
        steps except the first.

        Args:
            batch_size: Images per step.
        """
        short = not self.steps
        steps = self.early if short else self.steps
        if not steps:
            return Speed()
        windows = self.windows
        if len(windows) < 2:
            windows = [(1, duration) for duration in steps]
        counts, seconds = torch.tensor(windows, dtype=torch.float64).unbind(1)
        rate = batch_size * counts.sum() / seconds.sum()
        squares = (batch_size * counts / seconds - rate).square()
        variance = (squares * seconds).sum() / seconds.sum()
        # A single window, or a single step, has no deviation.
        std = variance.sqrt().item() if len(windows) > 1 else None
        times = torch.tensor(steps, dtype=torch.float64)
        step_std = times.std().item() if len(steps) > 1 else None
        launches = self.launches[short] / sum(steps)
        return Speed(
            Throughput(rate.item(), std),
            StepTime(
                mean=sum(steps) / len(steps),
                std=step_std,
                # torch.quantile refuses very large tensors, so only the last million steps count.
                p95=times[-1_000_000:].quantile(0.95).item(),
            ),
            self.waits[short] / sum(steps),
            launches if self.cuda else None,
            short,
        )


class Stopwatch:
    """Context manager that measures every `every`-th block and adds up the measured durations.

    Only the methods `seconds` and `lap` wait for a device.
    """

    def __init__(self, device: torch.device, every: int = 1) -> None:
        self.cuda = device.type == "cuda"
        self.every = every
        # Number of all blocks, and number of measured blocks.
        self._seen = 0
        self._blocks = 0
        self._lap = (0.0, 0)
        self._total = 0.0
        self._begin: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self._seen += 1
        if self._seen % self.every == 0:
            self._begin = self._now()
        else:
            self._begin = None

    def __exit__(self, *_: object) -> None:
        if self._begin is None:
            return
        end = self._now()
        self._blocks += 1
        if not self.cuda:
            self._total += end - self._begin
            return
        self._spans.append((self._begin, end))
        while len(self._spans) > 64 and self._spans[0][1].query():
            self._fold()

    def _now(self) -> Any:
        if self.cuda:
            return record_event()
        return time.perf_counter()

    def _fold(self) -> None:
        begin, end = self._spans.pop(0)
        self._total += begin.elapsed_time(end) / 1e3

    def seconds(self) -> float:
        """Wait for the measured blocks, and return their total seconds."""
        while self._spans:
            self._spans[0][1].synchronize()
            self._fold()
        return self._total

    def lap(self) -> float:
        """Return the mean seconds of the blocks measured since the last call; 0 for no block."""
        before, blocks = self._lap
        self._lap = (self.seconds(), self._blocks)
        return (self._lap[0] - before) / max(1, self._blocks - blocks)


class Ledger:
    """Seconds of a process by activity.

    At each moment there is exactly one activity, so the seconds add up to the time since the start.
    """

    def __init__(self, part: str) -> None:
        """Start the clock with the activity `part`."""
        # Devices that `span` synchronizes.
        self.devices: Sequence[torch.device] = ()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.start_time = time.perf_counter()
        # Start of the first attempt, if earlier ones in this process have run out of memory.
        self.run_start = self.start_time
        self._since = self.start_time
        self._part = part
        # Mean seconds of a step in the first window, until the second window has ended; else None.
        self._first: float | None = None
        # Seconds of all steps up to the end of the last window.
        self._ended = 0.0

    def start_part(self, part: str, at: float | None = None) -> str:
        """Start the activity `part` and return the previous one.

        Args:
            part: The new activity.
            at: Start of the new activity, as a value of `time.perf_counter`; None for now.
        """
        now = time.perf_counter() if at is None else at
        before = self._part
        self.seconds[before] += now - self._since
        self._since = now
        self._part = part
        return before

    def read_seconds(self) -> dict[str, float]:
        """Return the seconds of each activity so far."""
        self.start_part(self._part)
        return dict(self.seconds)

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """Count this block as the activity `part`. Synchronize the devices before and after it.

        If the block fails, the devices are not synchronized again, because they may wait for a rank
        that has exited.
        """
        synchronise(self.devices)
        before = self.start_part(part, time.perf_counter())
        try:
            yield
            synchronise(self.devices)
        finally:
            self.start_part(before, time.perf_counter())

    def note_steps(
        self,
        steps: int,
        seconds: float,
        waited: float,
        counted: float,
    ) -> None:
        """Note that a window of steps has ended.

        The time of `STEPS` excludes waiting for data, and the excess of the first step over later
        steps.

        Args:
            steps: Number of steps of the window.
            seconds: Duration of the window.
            waited: Seconds that the steps of the window waited for data.
            counted: Seconds of waiting for data in all steps so far, as `StepTimer` counts them
                for the verdict. Any other waiting is attributed to the start of the workers.
        """
        if not steps:
            return
        self._move(waited, STEPS, FIRST)
        self._move(counted - self.seconds.get(DATA, 0.0), FIRST, DATA)
        mean = (seconds - waited) / steps
        if self._first is not None:
            self._move(max(0.0, self._first - mean), STEPS, f"{START}first step")
        self._first = None
        if self._ended == 0.0:
            self._first = mean
        self._ended = self.read_seconds()[STEPS]

    def note_peers(self, seconds: float) -> None:
        """Move `seconds` from steps to data: this rank waited for ranks that waited for data."""
        self._move(seconds, STEPS, DATA)

    def note_failure(self) -> None:
        """Note that the run failed: the steps since the last window are unfinished."""
        unfinished = max(0.0, self.read_seconds().get(STEPS, 0.0) - self._ended)
        self._move(unfinished, STEPS, UNFINISHED)

    def _move(
        self,
        seconds: float,
        source: str,
        target: str,
    ) -> None:
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

"""Times of steps and of a run's parts, throughput. Nothing here waits for a device in a step."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from trainer.saving.journal import DATA, START, STEPS, UNFINISHED


def synchronise(devices: Sequence[torch.device]) -> None:
    """Wait until the devices have done what they were given."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def record_event() -> torch.cuda.Event:
    """An event for timing, where the current stream is now."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass(frozen=True)
class Throughput:
    """Images a second, and their deviation over windows, each weighing as much as it lasted; None for one window."""

    samples_per_sec: float
    std: float | None


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    mean: float
    std: float | None
    p95: float


@dataclass(frozen=True)
class Speed:
    """What result.json has of a run's speed, by its keys; None where nothing was measured."""

    throughput: Throughput | None = None
    step_time_s: StepTime | None = None
    data_wait_fraction: float | None = None
    launch_bound_fraction: float | None = None  # at most, as `StepTimer` tells; None without a GPU
    short: bool = True


class StepTimer:
    """Times of steps, and of waiting for data within them, cut into windows that end at synchronised moments.

    On CUDA the host runs ahead, so steps are timed by events on the device; elsewhere by the clock. Waiting for data
    then is what both did: the host waits while the device still computes, and that costs nothing.

    Whether a device waits for launches shows in when it ends a step, beside when the host has issued the next one. A
    step that was issued as a whole before the device came to it waits for none, and tells how long a step is then.
    Where the device comes first, it may wait until the last kernel is issued; what comes later is its own work. How
    long it works before, no event tells: these seconds, without those of waiting for data and no more than what the
    step is longer than one that waits for none, are the most that it waits.
    """

    MARKED = 8  # on CUDA the optimizer's part is looked at in one step of so many: an event costs some microseconds

    def __init__(self, devices: Sequence[torch.device], warmup: int) -> None:
        """`devices` are those that this process drives; a window ends when all have done their work."""
        self.devices, self.cuda = devices, devices[0].type == "cuda"
        self.warmup = warmup
        self.seen = 0
        self.steps = array("d")  # seconds of each measured step
        self.early = array("d")  # the same for warm-up steps after the first, used by runs with nothing else
        self.waits = [0.0, 0.0]  # seconds waited for data in measured, and early, steps
        self.launches = [0.0, 0.0]  # seconds, at most, that the device waited for them, likewise
        self.windows: list[tuple[int, float]] = []  # (steps, seconds) of each measured window
        self._lap = 0  # windows before the latest `lap`
        # Seconds of the optimizer's part where it was looked at, of measured, and early, steps.
        self.updates: tuple[array[float], array[float]] = (array("d"), array("d"))
        self.latest_launches = 0.0  # share of the last window, at most
        self._own = 0.0  # seconds of the latest steps that waited for no launch, the shortest of a window
        self._events: list[torch.cuda.Event] = []
        self._marks: list[tuple[int, torch.cuda.Event]] = []  # where the optimizer's part of a step began
        self._gaps: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []  # the device's, by step
        self._resumed: dict[int, torch.cuda.Event] = {}  # where a step begins, if not at the end of the one before
        self._mark = self._asked = 0.0
        # Of each step its end's time, the seconds it waited for data, and those of its optimizer's part.
        self._pending: list[tuple[float, float, float]] = []
        self.start()

    def start(self) -> None:
        """A window begins here: what lies before (evaluation, saving) is nobody's step."""
        self._pending.clear()
        if self.cuda:
            self._marks.clear()
            self._gaps.clear()
            self._resumed.clear()
            self._events = [record_event()]
        self._begun = time.perf_counter()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens in this block, between two steps and with the devices idle before and after it, is no step's."""
        begun = time.perf_counter()
        yield
        if self.cuda:
            self._resumed[len(self._pending)] = record_event()
        seconds = time.perf_counter() - begun
        self._begun += seconds
        self._pending = [(end + seconds, waited, update) for end, waited, update in self._pending]

    def update(self) -> None:
        """What the step does from here on is the optimizer's part."""
        if not self.cuda:
            self._mark = time.perf_counter()
        elif len(self._pending) % self.MARKED == 0:
            self._marks.append((len(self._pending), record_event()))

    def ask(self) -> None:
        """A micro-batch is asked for: what the device has been given so far is all it does until it comes."""
        if self.cuda:
            first = not self._gaps or self._gaps[-1][0] < len(self._pending)
            latest = self._resumed.get(len(self._pending), self._events[-1])
            self._before = latest if first else record_event()
        self._asked = time.perf_counter()

    def arrive(self) -> float:
        """It is here; seconds that the host waited."""
        waited = time.perf_counter() - self._asked
        if self.cuda:
            self._gaps.append((len(self._pending), self._before, record_event()))
        return waited

    def step(self, waited: float) -> None:
        """A step has been issued, after waiting so long for its data."""
        if self.cuda:
            self._events.append(record_event())
        now = time.perf_counter()
        self._pending.append((now, waited, now - self._mark))

    def stop(self) -> tuple[int, float, float]:
        """Close the window after a synchronisation: its steps, its seconds, its seconds waiting for data."""
        if not self._pending:
            self.start()
            return 0, 0.0, 0.0
        if self.cuda:
            synchronise(self.devices)
            begins = [self._resumed.get(n, event) for n, event in enumerate(self._events[:-1])]
            durations = [a.elapsed_time(b) / 1e3 for a, b in zip(begins, self._events[1:], strict=True)]
        else:
            ends = [self._begun, *(end for end, _, _ in self._pending)]
            durations = [b - a for a, b in pairwise(ends)]
        seconds = time.perf_counter() - self._begun
        waits = [wait for _, wait, _ in self._pending]
        if self._gaps:
            idle = [0.0] * len(waits)
            for step, before, after in self._gaps:
                idle[step] += before.elapsed_time(after) / 1e3
            waits = [min(pair) for pair in zip(waits, idle, strict=True)]
        launches = self._launches(durations, waits) if self.cuda else [0.0] * len(waits)
        self.latest_launches = sum(launches) / max(sum(durations), 1e-9)
        first = self.seen
        self._note_updates()
        self.seen += len(durations)
        for number, (duration, wait, launch) in enumerate(zip(durations, waits, launches, strict=True), first):
            if number > 0 or not self.warmup:
                early = number < self.warmup
                (self.early if early else self.steps).append(duration)
                self.waits[early] += wait
                self.launches[early] += launch
        if first >= self.warmup:
            self.windows.append((len(durations), seconds))
        self.start()
        return len(durations), seconds, sum(waits)

    def _launches(self, durations: Sequence[float], waits: Sequence[float]) -> list[float]:
        """Of each step the seconds in which the device had come to it and the host still issued it, waiting for data
        left out. On the host's clock, as an idle device reaches the window's first event when it is recorded."""
        found, reached, before = [], self._begun, self._begun
        for (issued, waited, _), duration, wait in zip(self._pending, durations, waits, strict=True):
            reading = max(wait, waited - max(0.0, reached - before))  # since the device has come to the step
            found.append(max(0.0, issued - reached - reading))
            reached, before = reached + duration, issued
        rows = [*zip(found, durations, waits, strict=True)]
        self._own = min((duration for launch, duration, _ in rows if launch == 0), default=self._own)
        return [min(launch, max(0.0, duration - wait - self._own)) for launch, duration, wait in rows]

    def lap(self) -> tuple[int, float]:
        """Steps and seconds measured since the last call."""
        fresh, self._lap = self.windows[self._lap :], len(self.windows)
        return sum(steps for steps, _ in fresh), sum(seconds for _, seconds in fresh)

    def _note_updates(self) -> None:
        if self.cuda:
            updates = [(n, mark.elapsed_time(self._events[n + 1]) / 1e3) for n, mark in self._marks]
        else:
            updates = [(n, update) for n, (_, _, update) in enumerate(self._pending)]
        for n, seconds in updates:
            number = self.seen + n
            if number > 0:
                self.updates[number < self.warmup].append(seconds)

    def update_seconds(self) -> float:
        """Mean seconds of the optimizer's part of the steps that `summary` tells of."""
        updates = self.updates[not self.steps]
        return sum(updates) / max(1, len(updates))

    def summary(self, batch_size: float) -> Speed:
        """Speed over all measured windows; a run too short for its warm-up uses its later steps."""
        short = not self.steps
        steps = self.early if short else self.steps
        if not steps:
            return Speed()
        windows = self.windows if len(self.windows) > 1 else [(1, s) for s in steps]
        counts, seconds = torch.tensor(windows, dtype=torch.float64).unbind(1)
        rate = batch_size * counts.sum() / seconds.sum()
        spread = ((batch_size * counts / seconds - rate).square() * seconds).sum() / seconds.sum()
        std = spread.sqrt().item() if len(windows) > 1 else None  # a single one has no spread
        times = torch.tensor(steps, dtype=torch.float64)
        p95 = times[-1_000_000:].quantile(0.95).item()  # of more, torch has none
        step_time = StepTime(sum(steps) / len(steps), times.std().item() if len(steps) > 1 else None, p95)
        waits, launches = (parts[short] / sum(steps) for parts in (self.waits, self.launches))
        return Speed(Throughput(rate.item(), std), step_time, waits, launches if self.cuda else None, short)


class Stopwatch:
    """Seconds of all the blocks that it was held over, or of one in `every`; nothing waits for a device before
    `seconds`."""

    def __init__(self, device: torch.device, every: int = 1) -> None:
        self.cuda, self.every = device.type == "cuda", every
        self._seen = self._blocks = 0  # in all, and those that were measured
        self._lap = (0.0, 0)
        self._total = 0.0
        self._begin: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self._seen += 1
        self._begin = self._now() if self._seen % self.every == 0 else None

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
        return record_event() if self.cuda else time.perf_counter()

    def _fold(self) -> None:
        begin, end = self._spans.pop(0)
        self._total += begin.elapsed_time(end) / 1e3

    def seconds(self) -> float:
        while self._spans:
            self._spans[0][1].synchronize()
            self._fold()
        return self._total

    def lap(self) -> float:
        """Mean seconds of the blocks that were measured since the last call; 0 where none was."""
        seconds, blocks = self.seconds(), self._blocks
        before, self._lap = self._lap, (seconds, blocks)
        return (seconds - before[0]) / max(1, blocks - before[1])


class Ledger:
    """Seconds of a process by what it does: at each moment one part, so that they add up."""

    def __init__(self, part: str, devices: Sequence[torch.device] = ()) -> None:
        """It begins with this part."""
        self.devices = devices
        self.seconds: dict[str, float] = {}
        self.begun = self._since = time.perf_counter()  # when it was made
        self._part = part
        self._first: float | None = None  # seconds of the first step, until those of the next ones are known
        self._ended = 0.0  # seconds of steps that have ended

    def turn(self, part: str, at: float | None = None) -> str:
        """From here on, or from `time.perf_counter()` `at` on, it is this part; gives the one before."""
        now, before = time.perf_counter() if at is None else at, self._part
        self._move(now - self._since, None, before)
        self._since, self._part = now, part
        return before

    def by_now(self) -> dict[str, float]:
        """Seconds of each part so far."""
        self.turn(self._part)
        return dict(self.seconds)

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """What happens in this block, with the devices idle before and after it.

        Where it fails nothing is waited for: the device may have work that needs a peer which is gone.
        """
        synchronise(self.devices)
        before = self.turn(part, time.perf_counter())
        try:
            yield
            synchronise(self.devices)
        finally:
            self.turn(before, time.perf_counter())

    def note_steps(self, steps: int, seconds: float, waited: float) -> None:
        """A window of steps has ended: what they waited for data, and what the first one took longer, is no step's."""
        if not steps:
            return
        self._move(waited, STEPS, DATA)
        mean = (seconds - waited) / steps
        if self._first is not None:
            self._move(max(0.0, self._first - mean), STEPS, f"{START}first step")
        self._first = mean if self._ended == 0.0 else None
        self._ended = self.by_now()[STEPS]

    def note_failure(self) -> None:
        """Steps since the last window have not ended."""
        self._move(max(0.0, self.by_now().get(STEPS, 0.0) - self._ended), STEPS, UNFINISHED)

    def _move(self, seconds: float, source: str | None, target: str) -> None:
        for part, change in ((source, -seconds), (target, seconds)):
            if part is not None:
                self.seconds[part] = self.seconds.get(part, 0.0) + change

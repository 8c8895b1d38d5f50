"""What is measured: step times, throughput, memory, FLOPs. Nothing here waits for a device in a step."""

from __future__ import annotations

import copy
import os
import resource
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from trainer.devices.precision import computed_in

# Dense peaks in TFLOP/s from NVIDIA's data sheets, by torch's name of the card: a chip has others in other shapes,
# and a part of one (MIG) none. fp32 is without tensor cores; what a card computes by other means only has no peak.
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
_HOPPER, _AMPERE = (67.0, 495.0, 989.0, 989.0), (19.5, 156.0, 312.0, 312.0)
PEAK_TFLOPS: dict[str, tuple[float | None, ...]] = {
    "NVIDIA H200": _HOPPER,
    "NVIDIA H100 80GB HBM3": _HOPPER,
    "NVIDIA H100 PCIe": (51.0, 378.0, 756.0, 756.0),
    "NVIDIA A100-SXM4-40GB": _AMPERE,
    "NVIDIA A100-SXM4-80GB": _AMPERE,
    "NVIDIA A100-PCIE-40GB": _AMPERE,
    "NVIDIA A100 80GB PCIe": _AMPERE,
    "NVIDIA L40S": (91.6, 183.0, 362.0, 362.0),
    "NVIDIA L40": (90.5, 90.5, 181.0, 181.0),
    "NVIDIA L4": (30.3, 60.0, 121.0, 121.0),
    "NVIDIA A40": (37.4, 74.8, 149.7, 149.7),
    "NVIDIA A30": (10.3, 82.0, 165.0, 165.0),
    "NVIDIA A10": (31.2, 62.5, 125.0, 125.0),
    "Tesla V100-SXM2-16GB": (15.7, None, 125.0, None),
    "Tesla V100-SXM2-32GB": (15.7, None, 125.0, None),
    "Tesla V100-PCIE-16GB": (14.0, None, 112.0, None),
    "Tesla V100-PCIE-32GB": (14.0, None, 112.0, None),
    "Tesla T4": (8.1, None, 65.0, None),
}


def synchronise(devices: Sequence[torch.device]) -> None:
    """Wait until the devices have done what they were given."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class StepTimer:
    """Times of steps, and of waiting for data within them, cut into windows that end at synchronised moments.

    On CUDA the host runs ahead, so steps are timed by events on the device; elsewhere by the clock. Waiting for data
    then is what both did: the host waits while the device still computes, and that costs nothing.
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
        self.windows: list[tuple[int, float]] = []  # (steps, seconds) of each measured window
        # Seconds of the optimizer's part where it was looked at, of measured, and early, steps.
        self.updates: tuple[array[float], array[float]] = (array("d"), array("d"))
        self._events: list[torch.cuda.Event] = []
        self._marks: list[tuple[int, torch.cuda.Event]] = []  # where the optimizer's part of a step began
        self._gaps: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []  # the device's, by step
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
            self._events = [self._event()]
        self._begun = time.perf_counter()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def update(self) -> None:
        """What the step does from here on is the optimizer's part."""
        if not self.cuda:
            self._mark = time.perf_counter()
        elif len(self._pending) % self.MARKED == 0:
            self._marks.append((len(self._pending), self._event()))

    def ask(self) -> None:
        """A micro-batch is asked for: what the device has been given so far is all it does until it comes."""
        if self.cuda:
            first = not self._gaps or self._gaps[-1][0] < len(self._pending)
            self._before = self._events[-1] if first else self._event()
        self._asked = time.perf_counter()

    def arrive(self) -> float:
        """It is here; seconds that the host waited."""
        waited = time.perf_counter() - self._asked
        if self.cuda:
            self._gaps.append((len(self._pending), self._before, self._event()))
        return waited

    def step(self, waited: float) -> None:
        """A step has been issued, after waiting so long for its data."""
        if self.cuda:
            self._events.append(self._event())
        now = time.perf_counter()
        self._pending.append((now, waited, now - self._mark))

    def stop(self) -> tuple[int, float, float]:
        """Close the window after a synchronisation: its steps, its seconds, its seconds waiting for data."""
        if not self._pending:
            self.start()
            return 0, 0.0, 0.0
        if self.cuda:
            synchronise(self.devices)
            durations = [a.elapsed_time(b) / 1e3 for a, b in pairwise(self._events)]
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
        first = self.seen
        self._note_updates()
        self.seen += len(durations)
        for number, (duration, wait) in enumerate(zip(durations, waits, strict=True), first):
            if number >= self.warmup:
                self.steps.append(duration)
                self.waits[0] += wait
            elif number > 0:
                self.early.append(duration)
                self.waits[1] += wait
        if first >= self.warmup:
            self.windows.append((len(durations), seconds))
        self.start()
        return len(durations), seconds, sum(waits)

    def _note_updates(self) -> None:
        if self.cuda:
            found = [(n, mark.elapsed_time(self._events[n + 1]) / 1e3) for n, mark in self._marks]
        else:
            found = [(n, update) for n, (_, _, update) in enumerate(self._pending)]
        for n, seconds in found:
            number = self.seen + n
            if number > 0:
                self.updates[number < self.warmup].append(seconds)

    def update_seconds(self) -> float:
        """Mean seconds of the optimizer's part of the steps that `summary` tells of."""
        found = self.updates[not self.steps]
        return sum(found) / max(1, len(found))

    def summary(self, batch_size: float) -> dict[str, Any]:
        """Throughput and step times over all measured windows; a run too short for its warm-up uses its later steps."""
        short = not self.steps
        steps = self.early if short else self.steps
        if not steps:
            return {"throughput": None, "step_time_s": None, "data_wait_fraction": None, "short": True}
        total, mean = sum(steps), sum(steps) / len(steps)
        windows = self.windows if len(self.windows) > 1 else [(1, s) for s in steps]
        counts, seconds = torch.tensor(windows, dtype=torch.float64).unbind(1)
        rate = batch_size * counts.sum() / seconds.sum()
        spread = ((batch_size * counts / seconds - rate).square() * seconds).sum() / seconds.sum()
        several = len(windows) > 1  # one alone tells nothing of the spread
        times = torch.tensor(steps, dtype=torch.float64)
        return {
            "throughput": {
                "samples_per_sec": rate.item(),
                "std": spread.sqrt().item() if several else None,  # over windows, each weighing as much as it lasted
            },
            "step_time_s": {
                "mean": mean,
                "std": times.std().item() if len(steps) > 1 else None,
                "p95": times.quantile(0.95).item()
                if len(steps) < 1_000_000
                else times[-1_000_000:].quantile(0.95).item(),
            },
            "data_wait_fraction": self.waits[int(short)] / total,
            "short": short,
        }


class Stopwatch:
    """Seconds of all the blocks that it was held over; nothing waits for a device before `seconds`."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._total = 0.0
        self._begin: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self._begin = self._now()

    def __exit__(self, *_: object) -> None:
        end = self._now()
        if not self.cuda:
            self._total += end - self._begin
            return
        self._spans.append((self._begin, end))
        while len(self._spans) > 64 and self._spans[0][1].query():
            self._fold()

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _fold(self) -> None:
        begin, end = self._spans.pop(0)
        self._total += begin.elapsed_time(end) / 1e3

    def seconds(self) -> float:
        while self._spans:
            self._spans[0][1].synchronize()
            self._fold()
        return self._total


class Ledger:
    """Seconds of a run outside the parts that every step has, by name."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self.seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """What happens in this block, with the devices idle before and after it."""
        synchronise(self.devices)
        begun = time.perf_counter()
        try:
            yield
        finally:
            synchronise(self.devices)
            self.add(name, time.perf_counter() - begun)


def forward_flops(model: nn.Module, shape: Sequence[int]) -> int:
    """Floating point operations of one forward pass on a batch of `shape`, counted on shapes alone.

    Raises:
        NotImplementedError: the model has an operator that cannot run on shapes alone.
    """
    probe = copy.deepcopy(model).to("meta").eval()
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        probe(torch.empty(tuple(shape), device="meta"))
    return int(counter.get_total_flops())


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's published dense peak in FLOP/s in a precision, or None where it is not known."""
    if device.type != "cuda":
        return None
    known = PEAK_TFLOPS.get(torch.cuda.get_device_name(device))
    peak = known[_PRECISIONS.index(computed_in(precision, device))] if known else None
    return None if peak is None else 1e12 * peak


def model_flops_utilisation(samples_per_sec: float, flops_per_sample: int, peak: float) -> float:
    """Share of the devices' peak that forward and backward (3 x forward) amount to.

    Chowdhery et al., "PaLM" (arXiv:2204.02311), appendix B.
    """
    return samples_per_sec * 3 * flops_per_sample / peak


def peak_memory(device: torch.device) -> int:
    """Most bytes this rank has held: torch's allocations on CUDA, the process's resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_memory(devices: Sequence[torch.device]) -> None:
    """Give back the memory that torch keeps for later, and begin its peaks anew: what was tried is no training."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on the device; on CPU what the machine and the control group leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as info:
            free = next(int(line.split()[1]) * 1024 for line in info if line.startswith("MemAvailable"))
        with open("/sys/fs/cgroup/memory.stat") as stat:  # cached files are given up when memory is wanted
            cached = next(int(line.split()[1]) for line in stat if line.startswith("inactive_file"))
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            free = min(free, int(limit.read()) - int(used.read()) + cached)
    except (OSError, ValueError, StopIteration):
        pass  # no such file, or "max": no limit
    return free


def activation_bytes(model: nn.Module, shape: Sequence[int]) -> int:
    """Bytes that autograd keeps between forward and backward for a batch of `shape` in fp32, from shapes alone.

    Raises:
        NotImplementedError: the model has an operator that cannot run on shapes alone.
    """
    probe = copy.deepcopy(model).to("meta").train()
    own = {p.untyped_storage()._cdata for p in probe.parameters()}
    kept: dict[int, Tensor] = {}  # by storage: views and in-place results of one tensor count once

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in own:
            kept.setdefault(storage, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        probe(torch.empty(tuple(shape), device="meta"))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

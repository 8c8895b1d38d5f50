"""Work that a device is given once, recorded, and repeats: CUDA graphs.

What is recorded is not computed until it is replayed, and then always on the same memory: no Python runs again. So
weights, random streams and running statistics are as before a recording, and one that fails has changed nothing.
"""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import torch

from trainer.recipe.versions import torch_has

Made = TypeVar("Made")


class NotRecorded(Exception):
    """Why some work cannot be repeated without its Python."""


def possible(device: torch.device) -> bool:
    """Whether the device has graphs."""
    return device.type == "cuda" and torch.version.hip is None


def host_draws() -> tuple[Any, ...]:
    """Where Python's and NumPy's generators are."""
    return random.getstate(), np.random.get_state()


def restore(drawn: tuple[Any, ...]) -> bool:
    """Put them back there; whether they still were."""
    python, numpy = host_draws()
    same = python == drawn[0] and all(np.array_equal(a, b) for a, b in zip(numpy, drawn[1], strict=True))
    random.setstate(drawn[0])
    np.random.set_state(drawn[1])
    return same


recording = False  # whether this process records at present
recoveries = 0  # times that a generator got another state: what was recorded before draws from one that nobody has


class StepRecorder:
    """Of one device: `torch.cuda.CUDAGraph`s on a stream of their own, over one pool of memory.

    They are replayed in any order, one after the other.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool: Any = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._beside: dict[torch.device, StepRecorder] = {device: self}

    def beside(self, device: torch.device) -> StepRecorder:
        """The one of another device for the same step, closed with this one; itself where it is its own."""
        if device not in self._beside:
            self._beside[device] = StepRecorder(device)
        return self._beside[device]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is computed in here is computed where recordings are made: to get libraries ready for one."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    @contextmanager
    def rehearsal(self) -> Iterator[list[str]]:
        """Gives, after its end, where the host waited for the device in it: such work cannot be recorded.

        Torch tells of most waits, not of all: it calls this a prototype.
        """
        waits: list[str] = []
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield waits
            finally:
                torch.cuda.set_sync_debug_mode(before)
        told = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
        waits += [f"{warning.filename}:{warning.lineno}" for warning in told]

    def record(
        self, work: Callable[[], Made], stream: torch.cuda.Stream | None = None
    ) -> tuple[Callable[[], None], Made]:
        """What replays `work`, and what it gave: tensors that each replay fills anew.

        `stream`: where it is recorded, if not where `aside` computes: where the work was computed before.

        Raises:
            NotRecorded: it waits for the device, draws random numbers on the host, or cannot be recorded otherwise.
        """
        # Not `torch.cuda.graph`: where a recording fails it leaves its stream as the current one.
        torch.cuda.synchronize(self.device)
        if self.pool is None:
            gc.collect()
            torch.cuda.empty_cache()  # blocks of eager steps, which the graphs' own memory is to take the place of
            with torch.cuda.device(self.device):
                self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        global recording
        drawn, state = host_draws(), torch.get_rng_state()
        collecting, recording = gc.isenabled(), True
        gc.disable()  # what it finalises may free events or memory of the device, which a recording forbids
        try:
            with torch.cuda.stream(stream or self.stream):
                # Other threads (photos, loggers, NCCL's watchdog) go on calling CUDA meanwhile.
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    made = work()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except Exception as error:  # whatever it is, launched it shows itself again, or does not happen
            self._recover()
            raise NotRecorded(str(error).strip().partition("\n")[0] or type(error).__name__) from error
        finally:  # nothing was computed
            recording = False
            undrawn = restore(drawn) and torch.equal(state, torch.get_rng_state())
            torch.set_rng_state(state)
            if collecting:
                gc.enable()
        if not undrawn:
            raise NotRecorded("it draws random numbers on the host, which a replay would not draw again")
        self._graphs.append(graph)
        return graph.replay, made

    def _recover(self) -> None:
        """After a recording that failed: launched work goes on as if there had been none.

        An older torch believes that the recording goes on: its generator, and its allocator, which then never takes
        back memory that several streams have used (pytorch/pytorch#180395), nor gives back the pool's.
        """
        global recoveries
        torch.cuda.synchronize(self.device)
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        if not torch_has("an end of captures that fail"):
            for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
                with suppress(RuntimeError):  # where torch has done so already
                    end(index, self.pool)
        if not torch_has("random states of each capture"):
            recoveries += 1
            generator = torch.cuda.default_generators[index]
            generator.graphsafe_set_state(generator.clone_state())

    def now(self) -> torch.cuda.Event:
        """A moment on the device."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def close(self) -> None:
        """Give the memory back; nothing is replayed any more."""
        for device, other in self._beside.items():
            if device != self.device:
                other.close()
        torch.cuda.synchronize(self.device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self.pool = None
        torch.cuda.empty_cache()


def seconds_between(before: Any, after: Any) -> float:
    """Of two moments; waits for the later one."""
    if isinstance(before, float):
        return float(after - before)
    after.synchronize()
    return before.elapsed_time(after) / 1e3  # type: ignore[no-any-return]

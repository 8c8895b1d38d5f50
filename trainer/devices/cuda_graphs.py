"""CUDA graphs: work that is captured once and replayed many times.

A capture records kernels without running them, so it does not change weights or running
statistics. Python code does run during a capture, so random states are restored after it, even if
it fails. A replay runs the kernels on the same memory, without Python.
"""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import torch

from trainer.versions import torch_has

Made = TypeVar("Made")
# Some passes compute nothing, such as the backward pass of a frozen stage.
warnings.filterwarnings("ignore", "The CUDA Graph is empty")


class NotCapturable(Exception):
    """Raised if work cannot be captured. The message is the reason."""


def has_cuda_graphs(device: torch.device) -> bool:
    """Return whether this program can use CUDA graphs on the device: only on an NVIDIA GPU."""
    return device.type == "cuda" and torch.version.hip is None


def host_random_states() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's global generators."""
    return random.getstate(), np.random.get_state()


def set_host_random_states(python: Any, numpy: Any) -> None:
    """Set the states of Python's and NumPy's global generators."""
    random.setstate(python)
    np.random.set_state(numpy)


def restore_random_states(drawn: tuple[Any, Any]) -> bool:
    """Restore states from `host_random_states`. Return True if they had not changed."""
    python, numpy = host_random_states()
    is_same = python == drawn[0] and all(map(np.array_equal, numpy, drawn[1]))
    set_host_random_states(*drawn)
    return is_same


def read_device_states(devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Return the state of torch's default generator of each device; repeated devices count once.

    This does not wait for a device, because the host has the states of CUDA generators, too.
    """
    states = []
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        else:
            states.append(torch.get_rng_state())
    return states


def set_device_states(devices: Sequence[torch.device], states: Sequence[torch.Tensor]) -> None:
    """Restore the states that `read_device_states` has returned for the same devices."""
    for device, state in zip(dict.fromkeys(devices), states, strict=True):
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)


# True during a capture.
is_capturing = False
# Number of times that a random generator got a new state object. Earlier captures still read the
# old object, which is no longer advanced, so they must not be replayed.
recoveries = 0


class StepRecorder:
    """Capture CUDA graphs, by default on a side stream. All graphs of a device share a memory pool.

    The graphs may be replayed in any order, but only one at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool: Any = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._by_device: dict[torch.device, StepRecorder] = {device: self}

    def get_recorder(self, device: torch.device) -> StepRecorder:
        """Return the recorder that captures the parts of the same step on `device`.

        For its own device, a recorder returns itself. Closing this recorder also closes those of
        other devices.
        """
        if device not in self._by_device:
            self._by_device[device] = StepRecorder(device)
        return self._by_device[device]

    @contextmanager
    def use_side_stream(self) -> Iterator[None]:
        """Run the block on the side stream, so that libraries are initialized before a capture."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            # Also after an error, because the caller may go on, for example with eager steps.
            current.wait_stream(self.stream)

    @contextmanager
    def collect_waits(self) -> Iterator[list[str]]:
        """Yield a list that will contain the lines of code at which the host waited for the device.

        Work that waits cannot be captured. The list is filled when the context ends. It may lack
        some waits, because torch's synchronization warnings are a prototype.
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
        for warning in caught:
            if "called a synchronizing" in str(warning.message):
                waits.append(f"{warning.filename}:{warning.lineno}")

    def record(
        self, work: Callable[[], Made], stream: torch.cuda.Stream | None = None
    ) -> tuple[Callable[[], None], Made]:
        """Capture `work`.

        Args:
            work: Function that computes on the device.
            stream: Stream to capture on. `work` must have run on this stream before. The default is
                the side stream.

        Returns:
            (replay, result): a function that replays the work, and the result of `work`. Each
            replay overwrites the tensors of `result`.

        Raises:
            NotCapturable: The work waits for the device, draws random numbers on the host, or
                cannot be captured for another reason.
        """
        # `torch.cuda.graph` is not used, because its stream stays the current stream after a
        # failure.
        torch.cuda.synchronize(self.device)
        if self.pool is None:
            gc.collect()
            # The graphs cannot use the cached blocks of eager steps, so these are released.
            torch.cuda.empty_cache()
            with torch.cuda.device(self.device):
                self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        global is_capturing
        host_states = host_random_states()
        torch_state = torch.get_rng_state()
        is_collecting = gc.isenabled()
        is_capturing = True
        # A finalizer may free events or memory of the device, which is not allowed in a capture.
        gc.disable()
        try:
            with torch.cuda.stream(stream or self.stream):
                # "thread_local" allows other threads (photo readers, loggers, NCCL's watchdog) to
                # call CUDA during the capture.
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    result = work()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except Exception as error:
            # Report every error as NotCapturable, so that the caller runs the step eagerly. If the
            # error comes from the work itself, the eager step raises it again.
            self._recover()
            raise NotCapturable(
                str(error).strip().partition("\n")[0] or type(error).__name__
            ) from error
        finally:
            # A capture computes nothing, so it must not advance random states.
            is_capturing = False
            is_unchanged = restore_random_states(host_states) and torch.equal(
                torch_state, torch.get_rng_state()
            )
            torch.set_rng_state(torch_state)
            if is_collecting:
                gc.enable()
        if not is_unchanged:
            raise NotCapturable(
                "it draws random numbers on the host, which a replay would not draw again"
            )
        self._graphs.append(graph)
        return graph.replay, result

    def _recover(self) -> None:
        """End a failed capture, so that eager work can continue.

        In older versions of torch, the random generator and the allocator do not notice the end of
        a failed capture. The allocator then never reuses memory that several streams have used
        (pytorch/pytorch#180395), and does not release the pool.
        """
        global recoveries
        torch.cuda.synchronize(self.device)
        index = self.device.index
        if index is None:
            index = torch.cuda.current_device()
        if not torch_has("an end of captures that fail"):
            for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
                # torch may already have ended the capture.
                with suppress(RuntimeError):
                    end(index, self.pool)
        if not torch_has("random states of each capture"):
            recoveries += 1
            generator = torch.cuda.default_generators[index]
            generator.graphsafe_set_state(generator.clone_state())

    def record_event(self) -> torch.cuda.Event:
        """Record an event that measures time on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def close(self) -> None:
        """Release the memory of all graphs, which can then no longer be replayed."""
        for device, other in self._by_device.items():
            if device != self.device:
                other.close()
        torch.cuda.synchronize(self.device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self.pool = None
        torch.cuda.empty_cache()


def seconds_between(before: Any, after: Any) -> float:
    """Return the seconds between two times, or between two CUDA events after waiting for them."""
    if isinstance(before, float):
        return float(after - before)
    after.synchronize()
    return before.elapsed_time(after) / 1e3  # type: ignore[no-any-return]

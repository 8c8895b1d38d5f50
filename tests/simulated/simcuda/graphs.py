"""CUDA graphs of simulated devices: captures, the private pools of their memory, and replays.

Streams in a capture have names of their own, for what they are given then happens in no order with
anything but itself. A replay is one kernel on the current stream, which reads and writes all that
the captured ones did.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from typing import Any

from tests.simulated.simcuda.order import Stream, new_name
from tests.simulated.tape import Pool, Recording, outside, without_modes
from trainer.versions import torch_has

REFUSED = "CUDA error: operation not permitted when stream is capturing"


class Capture:
    """A capture of a thread.

    Attributes:
        names: of its streams, by their own.
        events: that were recorded in it.
        broken: by what was not permitted.
    """

    def __init__(self, machine: Any, origin: Stream, pool: PrivatePool) -> None:
        self.machine = machine
        self.origin = origin
        self.pool = pool
        self.names: dict[int, int] = {}
        self.events: set[int] = set()
        self.broken: str | None = None
        self.join(origin)
        self.tape = Recording(pool.tape, self.refuse)
        self.tape.__enter__()

    def join(self, stream: Stream) -> None:
        if stream.own_id not in self.names:
            self.names[stream.own_id] = new_name()
            self.machine.order.captured.add(self.names[stream.own_id])
            self.machine.order.syncs.create_stream(self.names[stream.own_id])

    def refuse(self, what: str) -> None:
        self.broken = self.broken or what
        raise RuntimeError(f"{REFUSED}: {what}")

    def unjoined(self) -> bool:
        """Whether a stream has work that the first one does not wait for."""
        order = self.machine.order
        origin = self.names[self.origin.own_id]
        return any(
            not order.syncs.is_ordered_after(origin, order.last(name), name)
            for name in self.names.values()
        )

    def close(self) -> None:
        self.tape.__exit__(None, None, None)
        self.tape.close()


class PrivatePool:
    """Memory that captures share; which one's work is in it now."""

    def __init__(self, device: int) -> None:
        self.device, self.tape = device, Pool()
        self.overwritten: set[int] = set()  # memory of a graph that another one has used since


class Generator:
    """A device's, of `torch.cuda.default_generators`."""

    def __init__(self, machine: Any, index: int) -> None:
        self.machine = machine
        self.index = index

    def clone_state(self) -> Generator:
        return Generator(self.machine, self.index)

    def graphsafe_set_state(self, state: Generator) -> None:
        self.machine.graphs.drawing.discard(self.index)


class Graphs:
    """The graphs of a machine.

    Attributes:
        drawing: devices whose generator believes that it is captured, as after a capture that
            failed.
        allocating: devices whose allocator does, with their pools: before torch 2.13.
        mode: of `torch.cuda.set_sync_debug_mode`.
    """

    def __init__(self, machine: Any) -> None:
        self.machine, self._handles = machine, itertools.count(1)
        self.drawing: set[int] = set()
        self.allocating: dict[int, tuple[int, int]] = {}
        self.pools: dict[tuple[int, int], PrivatePool] = {}
        self.mode = 0

    def handle(self) -> tuple[int, int]:
        return 0, next(self._handles)

    def permit(self, what: str) -> None:
        """Refuse operations in a capture that wait for a device, or that free or allocate memory at
        once.
        """
        if (capture := self.machine.here.capture) is not None:
            capture.refuse(what)

    def launched(self, stream: Stream, what: str) -> None:
        """Check that all work of the thread is part of its capture."""
        capture = self.machine.here.capture
        if capture is not None and stream.own_id not in capture.names:
            self.machine.memory.errors.append(
                f"CAPTURE: {what} on {stream} is no part of the capture"
            )

    def draws(self, device: int) -> None:
        if device in self.drawing and self.machine.here.capture is None:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    def warn(self, what: str) -> None:
        if self.mode:
            frame = outside(sys._getframe(1))
            text = f"called a synchronizing CUDA operation ({what})"
            warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)

    def set_mode(self, mode: int | str) -> None:
        self.mode = {"default": 0, "warn": 1}.get(mode, mode)  # type: ignore[arg-type, assignment]

    def end_allocating(self, device: int, pool: tuple[int, int]) -> None:
        if self.allocating.pop(device, None) != pool:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    def stubs(self) -> dict[str, Any]:
        """Return the stubs for `torch.cuda`."""
        machine = self.machine

        class CUDAGraph(Graph):
            def __init__(self, keep_graph: bool = False) -> None:
                super().__init__(machine)

        return {
            "CUDAGraph": CUDAGraph,
            "graph_pool_handle": self.handle,
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": self.set_mode,
            "default_generators": [Generator(machine, index) for index in range(machine.count)],
            "is_current_stream_capturing": lambda: machine.current_stream().is_capturing(),
        }


class Graph:
    """A stand-in for `torch.cuda.CUDAGraph`."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.handle: tuple[int, int] | None = None
        self.tape: Recording | None = None

    def capture_begin(
        self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global"
    ) -> None:
        machine = self.machine
        stream = self.machine.current_stream()
        assert machine.here.capture is None and self.tape is None
        if stream is machine.default[stream.device_index]:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if capture_error_mode != "thread_local":
            machine.memory.errors.append(
                "CAPTURE: other threads may break one that is not thread_local"
            )
        self.handle = pool or machine.graphs.handle()
        self.device = stream.device_index
        self.private = machine.graphs.pools.setdefault(self.handle, PrivatePool(self.device))
        if self.private.device != self.device:
            raise RuntimeError("a pool is one device's")
        machine.graphs.draws(self.device)
        self.state = machine.generators[self.device]
        machine.graphs.drawing.add(self.device)
        machine.graphs.allocating[self.device] = self.handle
        machine.here.capture = Capture(machine, stream, self.private)

    def capture_end(self) -> None:
        machine = self.machine
        capture = self.machine.here.capture
        assert capture is not None, "no capture"
        unjoined = capture.unjoined()
        machine.here.capture = None
        capture.close()
        machine.generators[self.device] = self.state  # nothing was drawn
        self.reads, self.writes = machine.memory.captured({*capture.names.values()})
        if capture.broken or unjoined:
            why = (
                "unjoined work"
                if unjoined
                else f"a previous error during capture: {capture.broken}"
            )
            if torch_has("random states of each capture"):
                machine.graphs.drawing.discard(self.device)
            if torch_has("an end of captures that fail"):  # an older one believes that it goes on
                del machine.graphs.allocating[self.device]
            raise RuntimeError(f"CUDA error: operation failed due to {why}")
        machine.graphs.drawing.discard(self.device)
        del machine.graphs.allocating[self.device]
        self.tape = capture.tape

    def replay(self) -> None:
        machine = self.machine
        tape = self.tape
        private = self.private
        assert tape is not None, "nothing was captured, or it was reset"
        machine.graphs.permit("a replay")
        machine.graphs.draws(self.device)
        errors = machine.memory.errors
        with machine.order.lock:
            if private.tape.gone(
                (tape.outside & machine.memory.blocks.keys()) - private.tape.made.keys()
            ):
                errors.append("REPLAY: a graph uses memory that was given back")
            if private.overwritten.intersection(tape.outside):
                errors.append("POOL: a graph reads memory that another one has used since")
            private.overwritten |= {*tape.given}
            private.overwritten -= {*tape.made}
            stream = machine.current_stream(self.device)
            number = machine.order.kernel(stream)
            pairs = [(key, False) for key in self.reads] + [
                (key, True) for key in self.writes | {*tape.given}
            ]
            machine.memory.touch(stream, number, pairs, "the replay of a graph")
            with without_modes(), machine.drawing(self.device):
                tape.replay()

    def reset(self) -> None:
        self.machine.graphs.permit("a reset")
        if not self.machine.order.idle(self.machine.streams_of(self.device)):
            self.machine.memory.errors.append(
                "RESET: a graph's memory is given back while it may be replayed"
            )
        self.tape = None

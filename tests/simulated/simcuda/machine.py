"""A simulated machine: devices, their streams and memory, and what code that drives them
did wrong.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.simulated.simcuda.functions import index_of
from tests.simulated.simcuda.graphs import Graphs
from tests.simulated.simcuda.kernels import SAME
from tests.simulated.simcuda.memory import Memory
from tests.simulated.simcuda.order import Order, Stream
from tests.simulated.simcuda.waits import Waits, named, project_frames


class Card(NamedTuple):
    """A card of a machine.

    Attributes:
        size: bytes.
        capability: of computing: (7, 5) is Turing, (9, 0) Hopper.
        peers: whether it and other cards that have this reach each other's memory; else copies go
            through the host.
    """

    name: str = "NVIDIA H100 80GB HBM3"
    size: int = 80 << 30
    capability: tuple[int, int] = (9, 0)
    peers: bool = True


class Here(threading.local):
    """State that CUDA and torch keep for each thread."""

    def __init__(self) -> None:
        self.device = 0
        self.current: dict[int, Stream] = {}  # Devices whose current stream is not the default one.
        self.entered: list[Any] = []
        self.target: int | str | None = SAME  # Device for the tensor that is being created.
        self.capture: Any = None  # see `graphs`
        self.hint: int | None = None  # Device of the arguments of the present function.

    @contextmanager
    def having(self, name: str, value: Any) -> Iterator[None]:
        """Change one of the values in this block."""
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)


class Machine:
    """Devices, their streams and memory, and what was found wrong.

    Attributes:
        broken: devices on which an earlier kernel failed: whoever waits for them gets its error.
    """

    def __init__(self, cards: Sequence[Card]) -> None:
        self.cards, self.count = tuple(cards), len(cards)
        self.here, self.order, self.waits = Here(), Order(), Waits()
        self.streams: list[Stream] = []
        self.memory, self.graphs = Memory(self.order, [card.size for card in cards]), Graphs(self)
        self.default = [Stream(self, index) for index in range(self.count)]
        self.generators: list[Tensor] = []
        self.broken: set[int] = set()
        self.emptied = 0
        self.seed_all(0)

    @property
    def errors(self) -> list[str]:
        """Races, reuse and clocks read too early, each once."""
        return list(dict.fromkeys(self.memory.errors))

    def index(self, device: Any = None) -> int:
        index = self.here.device if device is None else index_of(device)
        if index is None or not 0 <= index < self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal ({device})")
        return index

    def card(self, device: Any = None) -> Card:
        return self.cards[self.index(device)]

    def current_stream(self, device: Any = None) -> Stream:
        index = self.index(device)
        return self.here.current.get(index, self.default[index])

    def streams_of(self, index: int) -> list[Stream]:
        return [stream for stream in self.streams if stream.device_index == index]

    def wait(self, what: str, kind: str) -> None:
        """The host is about to wait for a device."""
        self.graphs.permit(what)
        self.graphs.warn(what)
        self.waits.note(kind)

    def synchronize(self, device: Any = None) -> None:
        index = self.index(device)
        self.graphs.permit("a device's end")
        self.waits.note("synchronize")
        if index in self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        with self.order.lock:
            self.order.host_waits(self.streams_of(index))

    def seed_all(self, seed: int) -> None:
        self.generators = [
            torch.Generator().manual_seed(seed).get_state() for _ in range(self.count)
        ]

    def set_generator(self, state: Tensor, device: Any = "cuda") -> None:
        if self.here.capture is not None:
            self.here.capture.refuse("a generator's state is set")
        self.graphs.draws(self.index(device))
        self.generators[self.index(device)] = state.clone()

    def generator(self, device: Any = "cuda") -> Tensor:
        self.graphs.draws(self.index(device))
        return self.generators[self.index(device)].clone()

    @contextmanager
    def drawing(self, index: int) -> Iterator[None]:
        """Use the random generator of a device in this block."""
        host = torch.default_generator.get_state()
        torch.default_generator.set_state(self.generators[index])
        try:
            yield
        finally:
            self.generators[index] = torch.default_generator.get_state()
            torch.default_generator.set_state(host)

    def clock(self) -> float:
        """`time.perf_counter`; who times a device with it must have waited for it."""
        frames = project_frames(sys._getframe(1))
        if self.waits.measuring and frames and frames[0] is sys._getframe(1):
            name = named(frames[0])
            busy = [stream for stream in self.streams if not self.order.idle([stream])]
            if name in self.waits.measuring and busy:
                self.memory.errors.append(
                    f"CLOCK: {name} reads the clock while {busy[0]} may be at work"
                )
        return _clock()


_clock = time.perf_counter

"""Streams, events, and what happens before what on a simulated machine."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.cuda._sanitizer import StreamSynchronizations

_ids = itertools.count(1)


def new_name() -> int:
    """Return a name for a stream or an event."""
    return next(_ids)


class Order:
    """The partial order of everything that streams are given; its lock guards the whole machine."""

    def __init__(self) -> None:
        self.syncs = StreamSynchronizations()
        self.lock = threading.RLock()
        self.captured: set[int] = set()  # names that streams have in captures
        self._number = 0
        self._last: dict[int, int] = {}  # Number of the last kernel of each stream.
        self._on_their_way: list[tuple[int, int, Callable[[], Any]]] = []  # copies to the host
        self.hung: set[int] = set()  # devices that never end what they do

    def next(self, stream: Stream) -> int:
        """The number of what the stream does next."""
        self._number += 1
        self.syncs.update_seq_num(stream.id, self._number)
        return self._number

    def kernel(self, stream: Stream) -> int:
        number = self._last[stream.id] = self.next(stream)
        return number

    def names_not_of(self, stream: Stream) -> set[int]:
        """Return the streams that are not ordered with this stream's work: one of the two is in a
        capture.
        """
        capture = stream.machine.here.capture if stream.is_capturing() else None
        own = set() if capture is None else {*capture.names.values()}
        return {*self.syncs.current_sync_states} - own if own else self.captured

    def last(self, name: int) -> int:
        """The number of a stream's last kernel, 0 before there is one."""
        return self._last.get(name, 0)

    def after(self, stream: Stream, number: int, other: int) -> bool:
        """Return whether the stream's next work surely comes after the work of stream `other` at
        `number`.
        """
        return self.syncs.is_ordered_after(stream.id, number, other)

    def seen_by_host(self, stream: int, number: int) -> bool:
        return self.syncs.host_sync_state.get(stream, 0) >= number

    def idle(self, streams: list[Stream]) -> bool:
        """Return whether the host knows that these streams have finished all their kernels."""
        return all(self.seen_by_host(stream.id, self._last.get(stream.id, 0)) for stream in streams)

    def arrive_later(
        self,
        stream: Stream,
        number: int,
        copy: Callable[[], Any],
    ) -> None:
        """Do `copy` once the host has waited for the stream's `number`."""
        self._on_their_way.append((stream.id, number, copy))

    def host_waits(self, streams: list[Stream]) -> None:
        """The host waits until the streams have done what they were given."""
        self.for_ever({stream.device_index for stream in streams})
        for stream in streams:
            self.syncs.all_streams_wait_for_stream(stream.id)
        self.arrived()

    def for_ever(self, devices: set[int | None]) -> None:
        """Wait for a hung device like the host does: sleep in C, where no signal handler runs."""
        if devices & self.hung:
            mutex = ctypes.create_string_buffer(64)  # This thread locks the mutex twice.
            for _ in range(2):
                ctypes.CDLL(None).pthread_mutex_lock(mutex)

    def arrived(self) -> None:
        late = []
        for stream, number, copy in self._on_their_way:
            if self.seen_by_host(stream, number):
                copy()
            else:
                late.append((stream, number, copy))
        self._on_their_way = late


class Stream:
    """A stand-in for `torch.cuda.Stream`."""

    def __init__(self, machine: Any, index: int) -> None:
        self.machine, self.device_index, self.own_id = machine, index, new_name()
        machine.order.syncs.create_stream(self.own_id)
        machine.streams.append(self)

    @property
    def id(self) -> int:
        """Name in the order of events; a capture of this thread has another name."""
        capture = self.machine.here.capture
        return self.own_id if capture is None else capture.names.get(self.own_id, self.own_id)  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.machine)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        capture = self.machine.here.capture
        if capture is not None and event.id in capture.events:
            capture.join(self)
        elif capture is not None and self.is_capturing() and event.place is not None:
            capture.refuse(f"{self} waits for what is no part of the capture")
        elif event.captured:
            raise RuntimeError("CUDA error: a wait for an event that was recorded in a capture")
        with self.machine.order.lock:
            self.machine.order.syncs.stream_wait_for_event(self.id, event.id)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.machine.wait("a stream's end", "synchronize")
        with self.machine.order.lock:
            self.machine.order.host_waits([self])

    def is_capturing(self) -> bool:
        return self.id != self.own_id

    def __enter__(self) -> Stream:
        here = self.machine.here
        here.entered.append((here.device, here.current.get(self.device_index)))
        here.device, here.current[self.device_index] = self.device_index, self
        return self

    def __exit__(self, *_: object) -> None:
        here = self.machine.here
        here.device, before = here.entered.pop()
        if before is None:
            del here.current[self.device_index]
        else:
            here.current[self.device_index] = before

    def __repr__(self) -> str:
        return f"stream {self.id} of {self.device}"


class Event:
    """A stand-in for `torch.cuda.Event`."""

    def __init__(self, machine: Any, enable_timing: bool = False) -> None:
        self.machine, self.timing, self.id = machine, enable_timing, new_name()
        self.place: tuple[int, int] | None = None  # stream and number
        self.device: int | None = None  # Device of the stream.
        self.asked = False  # whether it is complete, since it was recorded
        self.captured = False  # whether it was recorded in a capture
        machine.order.syncs.create_event(self.id)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.machine.current_stream()
        with self.machine.order.lock:
            self.place = (stream.id, self.machine.order.next(stream))
            self.device = stream.device_index
            self.asked, self.captured = False, stream.is_capturing()
            if self.captured:
                self.machine.here.capture.events.add(self.id)
            self.machine.order.syncs.record_state(self.id, stream.id)
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        self.machine.graphs.permit("an event")
        self.machine.waits.note("synchronize")
        with self.machine.order.lock:
            self.machine.order.for_ever({self.device})
            self.machine.order.syncs.all_streams_wait_for_event(self.id)
            self.machine.order.arrived()

    def query(self) -> bool:
        """Return whether the device has reached the event: False for the first question, then True
        if the device ever reaches it.
        """
        order = self.machine.order
        self.machine.graphs.permit("a query")
        if self.place is None or order.seen_by_host(*self.place):
            return True
        if not self.asked or self.device in order.hung:
            self.asked = True
            return False
        with order.lock:
            order.syncs.all_streams_wait_for_event(self.id)
            order.arrived()
        return True

    def elapsed_time(self, end: Event) -> float:
        for event in (self, end):
            if not event.timing or event.place is None or event.captured:
                raise RuntimeError(
                    "elapsed_time of an event without enable_timing, never recorded, or captured"
                )
            if not self.machine.order.seen_by_host(*event.place):
                raise RuntimeError(
                    "elapsed_time of an event that is not complete (cudaErrorNotReady)"
                )
        return 1e3 * (end.at - self.at)

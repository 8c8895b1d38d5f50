"""Storages on simulated devices: who used them, and how the caching allocator reuses them."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.simulated.simcuda.order import Order, Stream
from tests.simulated.tape import key_of


class Access(NamedTuple):
    stream: int
    number: int
    write: bool
    what: str


@dataclass
class Block:
    """A storage on a device."""

    device: int
    stream: int  # Stream of the memory pool.
    size: int
    uses: list[Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)  # streams that `record_stream` named


@dataclass
class Pool:
    """Memory that the allocator keeps for a stream."""

    live: int = 0  # bytes
    reserved: int = 0
    # Uses of freed blocks that the allocator does not wait for.
    unsafe: list[list[Access]] = field(default_factory=list)


class Memory:
    """Storages that are not plain host memory."""

    def __init__(self, order: Order, sizes: Sequence[int]) -> None:
        self.order, self.sizes = order, sizes  # bytes of each device
        self.errors: list[str] = []
        self.blocks: dict[int, Block] = {}
        # Copies that may still read the pinned memory.
        self.pinned: dict[int, list[tuple[int, int]]] = {}
        self.pools: defaultdict[tuple[int, int], Pool] = defaultdict(Pool)
        self.peak: defaultdict[int, int] = defaultdict(int)
        self._references: dict[int, Any] = {}

    def device(self, tensor: Tensor) -> int | None:
        """Return the index of a tensor's device, or None for the host."""
        block = self.blocks.get(key_of(tensor))
        return None if block is None else block.device

    def place(self, tensor: Tensor, stream: Stream) -> None:
        """Allocate a new tensor's memory in the stream's pool."""
        storage = tensor.untyped_storage()
        name = storage._cdata
        device = stream.device_index
        if name in self.blocks:
            return
        self.blocks[name] = Block(device, stream.id, storage.nbytes())
        pool = self.pools[device, stream.id]
        pool.live += storage.nbytes()
        pool.reserved = max(pool.reserved, pool.live)
        self._references[name] = weakref.ref(storage, lambda _: self._free(name))
        if self.allocated(device) > self.sizes[device]:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {storage.nbytes()} bytes"
            )
        self.peak[device] = max(self.peak[device], self.allocated(device))

    def _free(self, name: int) -> None:
        self._references.pop(name, None)
        self.pinned.pop(name, None)
        block = self.blocks.pop(name, None)
        if block is None:
            return
        pool = self.pools[block.device, block.stream]
        pool.live -= block.size
        # The allocator waits for streams that were recorded. Its own stream works in order, and
        # others are unknown to it.
        left = [
            use
            for use in block.uses
            if use.stream != block.stream and use.stream not in block.recorded
        ]
        if left:
            pool.unsafe.append(left)

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.pinned[storage._cdata] = []
        self._references[storage._cdata] = weakref.ref(
            storage, lambda _, name=storage._cdata: self._free(name)
        )
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return key_of(tensor) in self.pinned

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        block = self.blocks.get(key_of(tensor))
        if block is not None:
            block.recorded.add(stream.id)

    def use(
        self,
        stream: Stream,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
        fresh: Sequence[Tensor],
        what: str,
    ) -> int:
        """A kernel on the stream.

        What it allocates may be any block that was given back to the stream's pool.
        """
        number = self.order.kernel(stream)
        if fresh:
            pool = self.pools[stream.device_index, stream.id]
            for left in pool.unsafe:
                for use in left:
                    if not self.order.after(stream, use.number, use.stream):
                        self.errors.append(
                            f"REUSE: {what} on {stream} may get memory that {use.what} on stream "
                            f"{use.stream} still uses (no record_stream)"
                        )
            pool.unsafe.clear()
        self.touch(
            stream,
            number,
            [*((key_of(t), False) for t in reads), *((key_of(t), True) for t in writes)],
            what,
        )
        return number

    def touch(
        self, stream: Stream, number: int, pairs: Iterable[tuple[int, bool]], what: str
    ) -> None:
        """A kernel of this number reads or writes storages."""
        # Captured work does not happen now: it is ordered with its own capture and with nothing
        # else.
        unlike = self.order.names_not_of(stream)
        for name, write in pairs:
            block = self.blocks.get(name)
            if block is None:
                continue
            for use in block.uses:
                if not (use.write or write) or use.stream == stream.id or use.stream in unlike:
                    continue
                if not self.order.after(stream, use.number, use.stream):
                    self.errors.append(
                        f"RACE: {what} on {stream} {'writes' if write else 'reads'} what "
                        f"{use.what} on stream {use.stream} {'wrote' if use.write else 'read'}"
                    )
            # Earlier work of this stream comes before its present work, so the last read and
            # write of a stream are enough.
            block.uses = [
                use for use in block.uses if use.stream != stream.id or (use.write and not write)
            ]
            block.uses.append(Access(stream.id, number, write, what))

    def captured(
        self,
        names: set[int],
    ) -> tuple[set[int], set[int]]:
        """Record reads and writes of a capture, which happen at its replays."""
        actual: tuple[set[int], set[int]] = set(), set()
        for name, block in self.blocks.items():
            for use in block.uses:
                if use.stream in names:
                    actual[use.write].add(name)
            block.uses = [use for use in block.uses if use.stream not in names]
        return actual

    def host_writes(self, tensor: Tensor, what: str) -> None:
        """The host writes to memory; copies that still read it see both."""
        for stream, number in self.pinned.get(key_of(tensor), ()):
            if not self.order.seen_by_host(stream, number):
                self.errors.append(
                    f"HOST: {what} writes to pinned memory that stream {stream} is still copying "
                    "from"
                )

    def allocated(self, device: int) -> int:
        return sum(pool.live for (where, _), pool in self.pools.items() if where == device)

    def reserved(self, device: int) -> int:
        return sum(pool.reserved for (where, _), pool in self.pools.items() if where == device)

    def empty_cache(self) -> None:
        for pool in self.pools.values():
            pool.reserved = pool.live

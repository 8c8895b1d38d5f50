"""Memory without a name that processes share: gone with them, however they end, and needs no /dev/shm. Linux only.

A worker of multiprocessing is sent the memory itself; other processes of this machine open its address.
"""

from __future__ import annotations

import mmap
import os
import weakref
from multiprocessing import reduction
from typing import Any, NamedTuple

from trainer.errors import SetupError

ALIGNMENT = 64  # bytes: a cache line, and what vector instructions like


class MemoryFile:
    """A file in memory, mapped; it grows."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor  # this process's, until `close`; maps stay as long as they are used
        self.close = weakref.finalize(self, os.close, descriptor)
        self.close.atexit = False
        self.memory = mmap.mmap(descriptor, 0)  # its bytes, as far as they are mapped

    @classmethod
    def create(cls, name: str, size: int, refusal: str) -> MemoryFile:
        """`size` bytes of zeros; `name` is what /proc calls them.

        Raises:
            SetupError: this system has no such files, which is the `refusal`.
        """
        if not hasattr(os, "memfd_create"):
            raise SetupError(refusal)
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        return cls(descriptor)

    def reach(self, size: int) -> mmap.mmap:
        """Its memory, of at least `size` bytes. What looks at the memory as it was before goes on to see the same."""
        if len(self.memory) < size:
            if os.fstat(self.descriptor).st_size < size:
                os.ftruncate(self.descriptor, 1 << (size - 1).bit_length())
            self.memory = mmap.mmap(self.descriptor, 0)
        return self.memory

    def private(self) -> mmap.mmap:
        """The same bytes; what this process writes stays its own, page by page."""
        return mmap.mmap(self.descriptor, 0, flags=mmap.MAP_PRIVATE)

    def address(self) -> Address:
        """Where other processes find it, as long as this one has not closed it."""
        return Address(os.getpid(), self.descriptor, os.fstat(self.descriptor).st_ino)

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.descriptor),)


def _received(descriptor: Any) -> MemoryFile:
    return MemoryFile(descriptor.detach())


def aligned(offset: int) -> int:
    """The next offset at which a tensor may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


class OtherProcessError(Exception):
    """The process is of another container, and one of that number is here."""


class Address(NamedTuple):
    """Where a process of this machine has a file in memory; it pickles."""

    pid: int
    descriptor: int
    inode: int

    def open(self) -> mmap.mmap:
        """Its bytes. Raises OSError where that is not allowed, OtherProcessError where another file is there."""
        descriptor = os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_ino != self.inode:
                raise OtherProcessError
            return mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)

"""Anonymous memory that processes share. Linux only.

The memory does not need /dev/shm, and the kernel frees it when the last process that uses it ends,
even if that process is killed. A worker of multiprocessing receives the file descriptor. Unrelated
processes on the same machine open the memory by its `Address`.
"""

from __future__ import annotations

import mmap
import os
import weakref
from multiprocessing import reduction
from typing import Any, NamedTuple

from trainer.errors import SetupError

# Alignment of tensors in bytes: one cache line. Vector instructions are faster on aligned data.
ALIGNMENT = 64


class MemoryFile:
    """Mapped file in memory that can grow.

    Attributes:
        descriptor: file descriptor in this process. Maps stay valid after it is closed.
        close: function that closes the descriptor.
        memory: map of the file.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)
        self.close.atexit = False
        self.memory = mmap.mmap(descriptor, 0)

    @classmethod
    def create(cls, name: str, size: int, refusal: str) -> MemoryFile:
        """Create a file of zeros.

        Args:
            name: name of the file in /proc, for debugging.
            size: size in bytes.
            refusal: message of the error if the system does not support files in memory.

        Raises:
            SetupError: the system does not support files in memory.
        """
        if not hasattr(os, "memfd_create"):
            raise SetupError(refusal)
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, size)
        return cls(descriptor)

    def reach(self, size: int) -> mmap.mmap:
        """Enlarge the file to at least `size` bytes, and return a map of the whole file.

        Tensors that are views of an earlier map stay valid and share their contents with the new
        map.
        """
        if len(self.memory) < size:
            if os.fstat(self.descriptor).st_size < size:
                # A power of two, so that repeated calls rarely map the file again.
                os.ftruncate(self.descriptor, 1 << (size - 1).bit_length())
            self.memory = mmap.mmap(self.descriptor, 0)
        return self.memory

    def private(self) -> mmap.mmap:
        """Return a copy-on-write map: pages that this process writes are visible only to it."""
        return mmap.mmap(self.descriptor, 0, flags=mmap.MAP_PRIVATE)

    def address(self) -> Address:
        """Return an address for other processes, which is valid while the file is open here."""
        return Address(os.getpid(), self.descriptor, os.fstat(self.descriptor).st_ino)

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.descriptor),)


def _received(descriptor: Any) -> MemoryFile:
    return MemoryFile(descriptor.detach())


def align(offset: int) -> int:
    """Round an offset in bytes up to a multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


class OtherProcessError(Exception):
    """The process id of an address belongs to an unrelated process.

    For example, the address comes from another container, in which process ids differ.
    """


class Address(NamedTuple):
    """Address of a memory file of a process on this machine. It can be pickled.

    Attributes:
        pid: id of the process.
        descriptor: file descriptor in that process.
        inode: inode number of the file, which `open` compares with that of the opened file.
    """

    pid: int
    descriptor: int
    inode: int

    def open(self) -> mmap.mmap:
        """Map the file.

        Raises:
            OSError: the process does not exist, has closed the file, or belongs to another user.
            OtherProcessError: the descriptor of the process refers to another file.
        """
        descriptor = os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDWR)
        try:
            if os.fstat(descriptor).st_ino != self.inode:
                raise OtherProcessError
            return mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)

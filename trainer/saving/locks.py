"""Locks on folders. The kernel lets go of a lock when its holder ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom
from pathlib import Path

from trainer.errors import FolderInUseError
from trainer.saving.files import writing

LOOKS, MOMENT = 3, 0.02  # who only looks whether a folder is held (`is_held`) has its lock for microseconds


def hold(folder: Path, others: str, name: str = ".lock") -> int:
    """Make a folder and hold it by its file `name`, whose descriptor is returned; closing that lets go.

    Raises FolderInUseError where another process holds it, which is of the kind `others` ("run").
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # A link would have another file overwritten.
        lock = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    for look in range(LOOKS):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(lock, folder / name):
                return lock
            break  # it was removed meanwhile, and another file may be the lock by now
        except OSError:
            time.sleep(MOMENT * (look + 1 < LOOKS))
    os.close(lock)
    raise FolderInUseError(f"{folder} is in use by another {others}; choose another output=")


@contextmanager
def folder_of(
    output: str | None, default: Path, others: str, is_used: Callable[[Path], object] = Path.exists
) -> Iterator[Path]:
    """`output`, else the first of `default`, `default`-2, ... that is not used; held within this block, as `hold`."""
    numbered = (default.with_name(f"{default.name}-{number}") for number in itertools.count(2))
    free = (path for path in itertools.chain([default], numbered) if not is_used(path))
    path = Path(output).expanduser() if output else next(free)
    lock = hold(path, others)
    try:
        yield path
    finally:
        os.close(lock)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def is_held(folder: Path, name: str = ".lock") -> bool:
    """Whether a living process holds a folder, as far as this machine knows. Nothing is made or changed."""
    try:
        lock = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # a disk without locks
        return False
    finally:
        os.close(lock)


@contextmanager
def in_turn(folder: Path, name: str) -> Iterator[None]:
    """Make a folder and hold it within this block, as soon as no other process does. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "ab") as lock:
        with suppress(OSError):  # a disk without locks: everybody for himself
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def claimed(path: Path) -> Iterator[BufferedRandom | None]:
    """Within this block a new, empty file that is this process's alone; None where another one has claimed it.

    Who died left the file behind, and no claim. A name that the holder gives the file takes it away.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with open(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = is_at(descriptor, path)  # else it was finished, or removed, between our opening and our locking it
        except BlockingIOError:
            ours = False
        if ours:
            file.truncate(0)
        yield file if ours else None


def open_lock(path: Path) -> int:
    """Open or make a lock's file, without the lock. Where it cannot be written, one that is there is enough.

    Raises:
        OSError: it cannot be made.
    """
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            with suppress(OSError):
                return os.open(path, os.O_RDONLY | flags)
        raise


def lock_alone(descriptor: int) -> bool:
    """Take the exclusive lock if nobody else holds the file; whether this succeeded. If not, a shared lock is lost too:
    the kernel lets go of one lock before it looks for another.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def lock_shared(descriptor: int) -> None:
    """Hold a file together with others, once nobody has it alone; closing the descriptor lets go."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)

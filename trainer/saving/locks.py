"""Locks on folders. The kernel releases a lock when the process that owns it ends in any way."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom
from pathlib import Path

from trainer.errors import FolderInUseError
from trainer.saving.files import report_write_errors

# Name of the file in a folder that is locked.
LOCK = ".lock"
# Maximum number of attempts to lock a folder, and seconds between two attempts. A failed attempt
# does not mean that the folder is in use, because `is_locked` locks it for some microseconds.
LOCK_ATTEMPTS = 3
RETRY_SECONDS = 0.02


def lock_folder(folder: Path, others: str) -> int:
    """Create a folder and lock it until the returned descriptor is closed.

    Args:
        folder: path of the folder.
        others: kind of process that may own the lock ("run"), for the message.

    Returns:
        The descriptor of the lock file.

    Raises:
        FolderInUseError: another process has locked the folder, or its file system does not support
            locks.
    """
    with report_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Refuse a symbolic link, because writing through it would overwrite another file.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        lock = os.open(folder / LOCK, flags, 0o666)
    for _ in range(LOCK_ATTEMPTS):
        if try_exclusive_lock(lock):
            if is_at(lock, folder / LOCK):
                return lock
            # Another process has removed or replaced the file since it was opened. A lock on the
            # old file does not protect the folder.
            break
        time.sleep(RETRY_SECONDS)
    os.close(lock)
    raise FolderInUseError(f"{folder} is in use by another {others}; choose another output=")


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether `path` is still the path of an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def is_locked(folder: Path) -> bool:
    """Return whether a living process has locked a folder, without changing the folder.

    Locks of processes on another machine are visible only if the file system shares them.
    """
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        lock = os.open(folder / LOCK, flags)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    # On a file system without support for locks, no folder counts as locked.
    except OSError:
        return False
    finally:
        os.close(lock)


@contextmanager
def wait_for_lock(folder: Path, name: str = "") -> Iterator[None]:
    """Create a folder and lock it within this block, after waiting for other processes.

    Args:
        folder: path of the folder.
        name: name of the lock file in the folder; "" to lock the folder itself.

    Raises:
        OSError: the folder or the lock file cannot be created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT if name else os.O_RDONLY
    lock = os.open(folder / name, flags, 0o666)
    try:
        # On a file system without support for locks, run the block without a lock.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def claim_file(path: Path) -> Iterator[BufferedRandom | None]:
    """Create an empty file that only this process may write within this block.

    A file that a dead process left behind is emptied and reused. If the block renames the file, the
    file is kept under its new path. Otherwise, the file is removed at the end of the block.

    Args:
        path: path of the file.

    Yields:
        The open file, or None if another process has claimed `path`.

    Raises:
        OSError: the file cannot be written.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o666)
    with open(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have renamed or removed the file before we locked it.
            is_ours = is_at(descriptor, path)
        except BlockingIOError:
            is_ours = False
        if is_ours:
            file.truncate(0)
        try:
            yield file if is_ours else None
        finally:
            # After a rename, the path may belong to a file that another process has claimed.
            if is_ours and is_at(descriptor, path):
                path.unlink(missing_ok=True)


def open_lock(path: Path) -> int:
    """Open a lock file without locking it. Create the file if it is missing.

    If permissions or a read-only file system do not allow writing, an existing file is opened for
    reading.

    Raises:
        OSError: the file cannot be opened or created.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            with suppress(OSError):
                return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        raise


def try_exclusive_lock(descriptor: int) -> bool:
    """Try to get the exclusive lock of a file, and return whether that succeeded.

    A failed attempt also loses a shared lock that this process had, because the kernel releases the
    shared lock before it tries to get the exclusive one.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def lock_shared(descriptor: int) -> None:
    """Get a shared lock of a file, after waiting for exclusive locks.

    Closing the descriptor releases the lock.
    """
    fcntl.flock(descriptor, fcntl.LOCK_SH)

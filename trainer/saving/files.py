"""Files that may be damaged, endless, a folder or a pipe: read with a limit and never waited for.

A run folder outlives machines and passes through many hands, so what lies beside the checkpoints is not to be trusted:
what cannot be used is left out with a sentence, and what cannot be written ends in one line.
"""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader, StringIO, TextIOWrapper
from pathlib import Path
from typing import IO, Any

from trainer.errors import DiskFullError, SetupError, TrainerError, is_disk_full

LIMIT = 64 * 2**20  # bytes of a side file that are read; ours are far smaller


class AppendFile:
    """A file that is appended to while others read it; subclasses decide how often it is flushed."""

    _file: IO[Any]
    _flushed: float  # when, by the monotonic clock

    def flush(self) -> None:
        self._file.flush()
        self._flushed = time.monotonic()

    def sync(self) -> None:
        """What was added is on the disk."""
        self.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def open_streams() -> None:
    """Give a program that was started without stdin, stdout or stderr (`>&- 2>&-`) empty ones.

    Otherwise the next files that are opened take their numbers, and what libraries print goes into them.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):  # as stderr is: names of files may be no text
        sys.stdout.reconfigure(errors="backslashreplace")


def portable(name: str) -> str:
    """A file's name, or a text with one, as UTF-8 can hold it: a byte that is none of it becomes four characters."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """The text of a CSV file of these rows, the first of which is its head."""
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def opened(path: str | bytes | Path) -> BufferedReader:
    """A regular file, to be read; anything else is an error at once, so that no pipe and no device is waited for.

    Raises:
        OSError: it cannot be opened, or is no file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file", os.fsdecode(path))
    return open(descriptor, "rb")


def read(path: str | Path, limit: int = LIMIT) -> bytes:
    """All of a regular file. Raises OSError where it cannot be read, is no file, or is larger than `limit` bytes."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EOVERFLOW, f"it has {size:,} bytes, at most {limit:,} are read", str(path))
        return file.read(size)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises OSError as `read`, and ValueError where it holds something else."""
    try:
        content = json.loads(read(path))
    except (ValueError, RecursionError):
        raise ValueError("it holds no JSON") from None
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    return content


def usable_json(path: Path, warn: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none, and where it is damaged, which goes to `warn`."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warn(f"{path} is left out: {why(error)}")
        return {}


def without_nan(value: Any) -> Any:
    """JSON knows no NaN: they become null."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def why(error: Exception) -> str:
    """Why a file could not be used, in a few words."""
    return str((error.strerror if isinstance(error, OSError) else None) or error)


def draft_of(path: Path) -> Path:
    """A name beside `path` that nothing has."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def put(draft: Path, path: Path) -> None:
    """Give a draft its name."""
    set_aside(path)
    os.replace(draft, path)


def set_aside(path: Path) -> None:
    """A folder that has the name of a file of ours keeps what it holds under another."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"aside-{uuid.uuid4().hex[:8]}-{path.name}"))


def remove(path: Path) -> None:
    """Remove what may be a folder, or not there; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@contextmanager
def writing(folder: Path, again: str = "resume=auto") -> Iterator[None]:
    """What the operating system refuses, as the error that names the folder; the words `again` go on from there.

    Raises:
        DiskFullError, SetupError.
    """
    try:
        yield
    except TrainerError:
        raise
    except OSError as error:
        reason = error.strerror or error
        if is_disk_full(error):
            advice = f"what was saved before is intact: free some space, then {again}"
            raise DiskFullError(f"{folder}: the disk is full ({reason}); {advice}") from error
        raise SetupError(f"{folder} cannot be written ({reason}); choose another folder with output=...") from error


def write_atomically(path: Path, text: str, check: Callable[[], None] = lambda: None) -> None:
    """Replace a file so that a reader sees the old text or the new; `check` raises where it may not be replaced."""
    temporary = draft_of(path)
    with writing(path.parent):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            check()
            put(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

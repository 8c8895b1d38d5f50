"""Robust access to the files of a run folder.

A run folder outlives machines, and many programs write to it, so its files may be damaged or huge,
and a directory or a pipe may have the name of a file. Reads therefore have a size limit and never
block. A file that cannot be used is skipped with a warning, and a file that cannot be written ends
the run with a one-line error.
"""

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
from trainer.processes.terminal import Say

# Contents of a JSON file whose top level is an object.
Json = dict[str, Any]
# Default limit of `read` in bytes. Larger files are refused; the files of a run are far smaller.
MAX_READ_BYTES = 64 * 2**20


class AppendFile:
    """Base class of files that are appended to while other programs read them.

    Subclasses choose how often the file is flushed.
    """

    _file: IO[Any]
    # Value of `time.monotonic()` at the last flush.
    _flushed: float

    def flush(self) -> None:
        self._file.flush()
        self._flushed = time.monotonic()

    def sync(self) -> None:
        """Flush the file and wait until its contents are on the disk."""
        self.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def open_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed (`>&- 2>&-`).

    Otherwise the next files that are opened would get the descriptors 0 to 2, and the output of
    libraries would be written into them.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # `os.open` returns the lowest free descriptor, which is `number`.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
    # File names may contain bytes that are not valid text. By default, printing such a name to
    # stdout raises an error. Use the error handler that Python uses for stderr instead.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def escape_non_utf8(name: str) -> str:
    """Escape the bytes of a file name that are not UTF-8, each by four characters.

    Args:
        name: file name, or a string that contains file names.
    """
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def format_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Format rows as the text of a CSV file. The first row is the header."""
    rows = [*rows]
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    if "\r" in text.getvalue():
        # Readers accept "\r" as the end of a line, but the csv module may leave a cell with "\r"
        # unquoted, because lines end in "\n" here. So quote all cells.
        text = StringIO()
        csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(rows)
    return text.getvalue()


def open_regular(path: str | bytes | Path, limit: float = math.inf) -> BufferedReader:
    """Open a regular file for reading. A pipe or a device raises instead of blocking.

    Args:
        path: path of the file.
        limit: maximum size in bytes.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or has more than `limit` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    fault = ""
    if not stat.S_ISREG(status.st_mode):
        fault = "it is not a file"
    elif status.st_size > limit:
        fault = f"it has {status.st_size:,} bytes, at most {limit:,} are read"
    if fault:
        os.close(descriptor)
        raise OSError(errno.EINVAL, fault, os.fsdecode(path))
    return open(descriptor, "rb")


def read(path: str | Path, limit: int = MAX_READ_BYTES) -> bytes:
    """Read a regular file completely.

    Args:
        path: path of the file.
        limit: maximum size in bytes.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is larger than `limit`.
    """
    with open_regular(path, limit) as file:
        return file.read()


def read_json(path: Path) -> Json:
    """Read a JSON file that contains an object.

    Raises:
        OSError: `read` cannot read the file.
        ValueError: the file does not contain a JSON object.
    """
    try:
        content = json.loads(read(path))
    except (ValueError, RecursionError):
        raise ValueError("it holds no JSON") from None
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    return content


def read_json_or_empty(path: Path, warn: Say = lambda line: None) -> Json:
    """Read a JSON file, or return an empty dictionary if it is missing or damaged.

    Args:
        path: path of the file.
        warn: called with one line if the file is damaged.
    """
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warn(f"{path} is left out: {describe_error(error)}")
        return {}


def without_nan(value: Any) -> Any:
    """Replace NaN and infinity, which JSON cannot represent, by None in nested containers."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def describe_error(error: Exception) -> str:
    """Return the system's message for an OSError, or else the text of the error."""
    return str(getattr(error, "strerror", None) or error)


def temporary_path(path: Path) -> Path:
    """Return an unused hidden path in the directory of `path`."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def replace_file(draft: Path, path: Path) -> None:
    """Rename a draft to `path`, replacing the file there."""
    set_aside(path)
    os.replace(draft, path)


def set_aside(path: Path) -> None:
    """Rename `path` if it is a directory, so that a file can have the name.

    The contents of the directory are kept. Anything else at `path` is left as it is.
    """
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"aside-{uuid.uuid4().hex[:8]}-{path.name}"))


def remove(path: Path) -> None:
    """Remove a file or a directory if it exists, and ignore errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def measure_size(folder: Path) -> int:
    """Return the total size in bytes of all files in a folder and its subfolders.

    Symbolic links are not followed. Files that are removed meanwhile do not count.
    """
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(parent, name)).st_size
    return size


@contextmanager
def report_write_errors(folder: Path, again: str = "resume=auto") -> Iterator[None]:
    """Convert an OSError of the block into an error whose one-line message names the folder.

    Args:
        folder: folder that the block writes to.
        again: what to type to continue after freeing space on the disk.

    Raises:
        DiskFullError: the disk is full.
        SetupError: the block raised another OSError.
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
        raise SetupError(
            f"{folder} cannot be written ({reason}); choose another folder with output=..."
        ) from error


def write_json(path: Path, content: object, check: Callable[[], None] = lambda: None) -> None:
    """Write `content` as JSON with `write_atomically`. NaN and infinity become null."""
    text = json.dumps(without_nan(content), indent=2, allow_nan=False, default=str)
    write_atomically(path, f"{text}\n", check)


def write_atomically(
    path: Path,
    text: str,
    check: Callable[[], None] = lambda: None,
    again: str = "resume=auto",
) -> None:
    """Replace a file atomically: readers see either the old or the new text, and never a mixture.

    Args:
        path: path of the file.
        text: new contents.
        check: called before the replacement; raises if the file must not be replaced.
        again: see `report_write_errors`.

    Raises:
        DiskFullError, SetupError: see `report_write_errors`.
    """
    temporary = temporary_path(path)
    with report_write_errors(path.parent, again):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            check()
            replace_file(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

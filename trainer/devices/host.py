"""This machine's processor and memory, and the limits that a container sets to them."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # bytes: a control group with more has no limit


def processor() -> str:
    """What it is called."""
    with suppress(OSError, StopIteration), open(PROC / "cpuinfo") as info:
        return next(line.partition(":")[2].strip() for line in info if line.startswith("model name"))
    return platform.processor() or platform.machine()


def total_memory() -> int:
    """Bytes of the whole computer."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory() -> int:
    """Bytes that this process can still have: what the computer has left, and every control group around it."""
    available = _table(PROC / "meminfo").get("MemAvailable")
    free = total_memory() if available is None else available * 1024
    for folder in _groups("memory"):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None:
            held = _table(folder / "memory.stat")  # cached files are given up when memory is wanted
            free = min(free, max(0, limit - used + held.get("total_inactive_file", held.get("inactive_file", 0))))
    return free


def memory_limit() -> int | None:
    """Bytes that the smallest control group around this process may have; None where none has a limit."""
    limits = [_number(folder, "memory.max", "memory.limit_in_bytes") for folder in _groups("memory")]
    return min((limit for limit in limits if limit is not None and limit < UNLIMITED), default=None)


def _groups(controller: str) -> list[Path]:
    """Folders of this process's control group and of those around it, of both versions, from the inside out."""
    lines = ["0::/", f"1:{controller}:/"]  # in a container its group is the outermost
    with suppress(OSError):
        lines += (PROC / "self" / "cgroup").read_text().splitlines()
    folders = set[Path]()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            inner = Path(path.lstrip("/"))
            home = GROUPS / controller if controllers else GROUPS
            folders |= {home / folder for folder in (inner, *inner.parents)}
    return sorted(folders, key=lambda folder: -len(folder.parts))


def _number(folder: Path, *names: str) -> int | None:
    for name in names:
        with suppress(OSError, ValueError):  # no such file, or "max"
            return int((folder / name).read_text())
    return None


def _table(path: Path) -> dict[str, int]:
    """Names and numbers, a line each."""
    with suppress(OSError, ValueError):
        rows = map(str.split, path.read_text().splitlines())
        return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1}
    return {}

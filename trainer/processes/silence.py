"""How long other ranks may be silent, in seconds in which this process was awake.

gloo's own limit runs on while a whole job is stopped (SIGSTOP, SLURM's suspend, a freezer), and it never uses a
connection again that it has given up. So gloo gets a limit of a year, and a thread counts the seconds in which a
waiting thread uses no processor. At the limit it shuts down what this process reads from others, and gloo raises in the
waiting thread, as it does when a peer dies. Of a connection that was closed between two operations gloo raises nothing:
then the thread that counts ends this process.
"""

from __future__ import annotations

import datetime
import math
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

Result = TypeVar("Result")

FOR_EVER = datetime.timedelta(days=365)
TICK = 0.25  # seconds
POLL = 0.1  # seconds between two looks at a thread that may hang
LEFT_TO_RAISE = 3.0  # seconds, for gloo, once nothing can be read any more
BUSY = 0.001  # seconds of a processor within a tick: this thread works


class AwakeClock:
    """Counts seconds in which this process was awake, for a loop that asks more often than every half second.

    A wait that ends by the system's clock would end at once when a whole job goes on after it was stopped.
    """

    def __init__(self) -> None:
        self._looked, self._awake = time.monotonic(), 0.0

    def seconds(self) -> float:
        """Since this clock was made."""
        now = time.monotonic()
        self._awake += min(now - self._looked, 2 * TICK)  # more: this process was stopped
        self._looked = now
        return self._awake


@dataclass(eq=False)
class Wait:
    """A block of a thread that may wait for other ranks."""

    limit: float  # seconds
    leave: Callable[[float], object]  # ends this process; gets the limit
    thread: int = field(default_factory=threading.get_ident)
    silent: float = 0.0
    over: bool = False

    def __post_init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(self.thread)
        self._used = -1.0

    def look(self, seconds: float) -> bool:
        """Count seconds in which the thread did nothing, one after the other; whether these are too many."""
        used = time.clock_gettime(self._clock)
        idle = used - self._used < BUSY and not self._waits_for_python()
        self.silent, self._used = self.silent + seconds if idle else 0.0, used
        self.over = self.over or self.silent >= self.limit
        return self.over

    def _waits_for_python(self) -> bool:
        """Whether it waits within Python's own library: for a compiler in another process, say."""
        frame = sys._current_frames().get(self.thread)
        module = str(frame.f_globals.get("__name__")) if frame else ""
        return module.partition(".")[0] in sys.stdlib_module_names


_limits: list[float] = []  # of this process's group: one, or none
_waits: list[Wait] = []


def watch(limit: float) -> datetime.timedelta:
    """From now on no rank may be silent for so many seconds; how long gloo is to wait."""
    if not hasattr(time, "pthread_getcpuclockid"):  # macOS
        return datetime.timedelta(seconds=limit)
    if not _limits:
        threading.Thread(target=_count, name="silence", daemon=True).start()
    _limits[:] = [limit]
    return FOR_EVER


def begin(limit: float | None, leave: Callable[[float], object]) -> Wait | None:
    """This thread may wait for other ranks from here on: so many seconds, or as long as the group's limit says."""
    if not _limits:
        return None
    _waits.append(Wait(limit or _limits[0], leave))
    return _waits[-1]


def is_waiting() -> bool:
    """Whether a thread of this process waits for other ranks now."""
    return bool(_waits)


def end(wait: Wait | None) -> float | None:
    """It waits no more; the seconds that were too long, if they were."""
    if wait is None:
        return None
    _waits.remove(wait)
    return wait.limit if wait.over else None


def _count() -> None:
    clock, before = AwakeClock(), 0.0
    while True:
        time.sleep(TICK)
        awake = clock.seconds()
        if any([wait.look(awake - before) for wait in list(_waits)]):
            _shut_down_reads()
        for wait in list(_waits):
            if wait.silent >= wait.limit + LEFT_TO_RAISE:
                wait.leave(wait.limit)
        before = awake


def _shut_down_reads() -> None:
    """Shut down reading from other ranks. With writing too, or with listening sockets, gloo would abort."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as line:
                internet = line.family in (socket.AF_INET, socket.AF_INET6) and line.type == socket.SOCK_STREAM
                if internet and not line.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    line.shutdown(socket.SHUT_RD)


def call_within(seconds: float, work: Callable[[], Result]) -> Result:
    """What `work` returns, in a thread of its own: where it hangs in a library, this thread still leaves.

    Raises:
        TimeoutError: it has not returned after so many seconds; those in which this process was stopped do not count.
    """
    results: list[Result] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    for _ in range(math.ceil(seconds / POLL)):
        thread.join(POLL)
        if not thread.is_alive():
            break
    if raised:
        raise raised[0]
    if not results:
        raise TimeoutError
    return results[0]

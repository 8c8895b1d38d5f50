"""Limit the time for which other ranks may be silent, counted while this process is awake.

The timeout of gloo keeps running while a whole job is stopped (SIGSTOP, SLURM's suspend, a cgroup
freezer), and gloo never reuses a connection that has timed out. Gloo therefore gets a timeout of
one year, and a thread of this module counts the seconds in which a waiting thread uses no CPU time.
At the limit, the counting thread shuts down the sockets for reading, so that gloo raises in the
waiting thread, as it does when a peer dies. Gloo raises nothing if a connection was closed between
two operations. In that case the counting thread ends this process.
"""

import datetime
import math
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

Result = TypeVar("Result")

GLOO_TIMEOUT = datetime.timedelta(days=365)
# Seconds between two checks of the waiting threads.
CHECK_SECONDS = 0.25
# Seconds between two checks of the thread in `call_within`.
POLL_SECONDS = 0.1
# Seconds in which gloo must raise after reads were shut down. Otherwise this process ends.
RAISE_SECONDS = 3.0
# A thread that uses less CPU time, in seconds, between two checks counts as silent, unless it is
# inside the standard library. A thread that uses more is working.
BUSY_SECONDS = 0.001


class AwakeClock:
    """Clock that counts the seconds in which this process was awake.

    A wait that uses the system's clock would time out as soon as a stopped job continues. `seconds`
    must be called at least every half second.
    """

    def __init__(self) -> None:
        self._last_call = time.monotonic()
        self._awake = 0.0

    def seconds(self) -> float:
        """Return the number of seconds in which this process was awake since the clock's creation.

        At most half a second is counted between two calls.
        """
        now = time.monotonic()
        # A longer interval means that this process was stopped, so the excess does not count.
        self._awake += min(now - self._last_call, 2 * CHECK_SECONDS)
        self._last_call = now
        return self._awake


@dataclass(eq=False)
class Wait:
    """Period in which a thread may wait for other ranks.

    Attributes:
        limit: maximum number of seconds of silence.
        leave: function that ends this process. It is called with `limit`.
        thread: id of the thread that waits.
        silent_seconds: seconds since the last check in which the thread was not silent.
        is_over: whether the limit was reached.
    """

    limit: float
    leave: Callable[[float], object]
    thread: int = field(default_factory=threading.get_ident)
    silent_seconds: float = 0.0
    is_over: bool = False

    def __post_init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(self.thread)
        self._cpu_seconds = -1.0

    def check(self, seconds: float) -> bool:
        """Add `seconds` to `silent_seconds`, or set it to 0 if the thread is not silent.

        The thread is not silent if it has used CPU time, or is inside Python's standard library.

        Returns:
            Whether the limit was reached, in this call or an earlier one.
        """
        cpu_seconds = time.clock_gettime(self._clock)
        used = cpu_seconds - self._cpu_seconds
        if used < BUSY_SECONDS and not self._is_in_standard_library():
            self.silent_seconds += seconds
        else:
            self.silent_seconds = 0.0
        self._cpu_seconds = cpu_seconds
        self.is_over = self.is_over or self.silent_seconds >= self.limit
        return self.is_over

    def _is_in_standard_library(self) -> bool:
        """Return whether the thread is inside the standard library.

        A thread inside the standard library does not wait for a rank but, for example, for a
        compiler in another process.
        """
        frame = sys._current_frames().get(self.thread)
        if frame is None:
            return False
        module = str(frame.f_globals.get("__name__"))
        return module.partition(".")[0] in sys.stdlib_module_names


# A list with the limit of the current process group in seconds; empty if no limit is set.
_limits: list[float] = []
_waits: list[Wait] = []


def set_limit(limit: float) -> datetime.timedelta:
    """Set the number of seconds for which a rank may be silent.

    Returns:
        The timeout for gloo.
    """
    # macOS does not report the CPU time of a thread, so gloo counts the silence there.
    if not hasattr(time, "pthread_getcpuclockid"):
        return datetime.timedelta(seconds=limit)
    if not _limits:
        threading.Thread(target=_count_silence, name="silence", daemon=True).start()
    _limits[:] = [limit]
    return GLOO_TIMEOUT


def begin_wait(limit: float | None, leave: Callable[[float], object]) -> Wait | None:
    """Start counting the silence while this thread waits for other ranks.

    Args:
        limit: maximum number of seconds. None selects the limit of the process group.
        leave: function that ends this process. It is called with the limit if gloo does not raise.

    Returns:
        The argument for `end_wait`; None if no limit is set.
    """
    if not _limits:
        return None
    _waits.append(Wait(limit or _limits[0], leave))
    return _waits[-1]


def is_waiting() -> bool:
    """Return whether a thread of this process is waiting for other ranks."""
    return bool(_waits)


def end_wait(wait: Wait | None) -> float | None:
    """Stop counting the silence, and return the limit if it was reached, else None."""
    if wait is None:
        return None
    _waits.remove(wait)
    return wait.limit if wait.is_over else None


def _count_silence() -> None:
    clock = AwakeClock()
    before = 0.0
    while True:
        time.sleep(CHECK_SECONDS)
        now = clock.seconds()
        # A list instead of a generator, because `any` must not skip the checks of later waits.
        if any([wait.check(now - before) for wait in list(_waits)]):
            _shut_down_reads()
        for wait in list(_waits):
            if wait.silent_seconds >= wait.limit + RAISE_SECONDS:
                wait.leave(wait.limit)
        before = now


def _shut_down_reads() -> None:
    """Shut down all TCP connections of this process for reading.

    Gloo would abort the process if writes or listening sockets were shut down, too.
    """
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as line:
                is_internet = line.family in (socket.AF_INET, socket.AF_INET6)
                if not is_internet or line.type != socket.SOCK_STREAM:
                    continue
                if not line.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    line.shutdown(socket.SHUT_RD)


def call_within(seconds: float, work: Callable[[], Result]) -> Result:
    """Call a function in a new thread, and return its result.

    If the function hangs inside a library, the calling thread can still continue.

    Args:
        seconds: timeout. Time in which this process is stopped does not count.
        work: function without arguments.

    Raises:
        TimeoutError: the function did not return in time.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    for _ in range(math.ceil(seconds / POLL_SECONDS)):
        with suppress(TimeoutError):
            return future.result(POLL_SECONDS)
    raise TimeoutError

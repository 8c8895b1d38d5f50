"""The one fork server of a process: loader workers and a DevicePool's workers are forked from it, in milliseconds.

This process itself is not forked: after OpenMP or CUDA has started, the child hangs. Only a rank of our launcher forks
its server, in its first moment, so that it imports nothing for it. Signals that reach the whole process group (Ctrl-C,
torchrun's SIGTERM, a terminal that closes) mean the parent, which still finishes its step and saves: they are blocked
from the server's first moment on, and in its children until those ignore them.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, reduction, resource_tracker, util
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from trainer.processes import early, family, pickling

SIGNALS = {signal.SIGINT, signal.SIGTERM, *early.SAVE_AND_GO}
ENDING = 0.5  # seconds that a killed process takes to end, at most
GONE = 255  # the exit code that multiprocessing gives a worker whose server is gone
SAFE = "PYTHONSAFEPATH"  # Python's variable: the working folder is not where modules come from
LONGEST = 70  # bytes of a folder's path; a socket's may have 107, of which Python needs 32
SERVED = "TRAINER_FORK_PARENT"  # whom the server dies with, or 0

ANSWER = 10.0  # seconds that a spare may take until it has what it needs to be the server

_spare: tuple[int, Connection] | None = None  # the child that waits to be this process's server: its id, and the line


def context(*preload: str) -> Any:
    """The context to start workers in; its server runs, and has torch and the modules that the first caller names.

    And torchvision where this process has it: a worker that needs it would load it for two seconds, each one by itself.
    """
    pickling.forget_stdin()
    context = multiprocessing.get_context("forkserver")
    server: Any = forkserver._forkserver
    if server._preload_modules == ["__main__"]:  # the user has not said otherwise, and main may do anything
        known = [name for name in ("torchvision", "trainer.data.photos.photo_reader") if name in sys.modules]
        context.set_forkserver_preload(["trainer.processes.preload", "torch", *dict.fromkeys([*preload, *known])])
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    resource_tracker.ensure_running()  # whose start unblocks some
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    # The kernel would kill the server with a lesser thread.
    os.environ[SERVED] = str(os.getpid() if threading.current_thread() is threading.main_thread() else 0)
    _choose_folder()
    before = os.environ.get(SAFE)
    if Path.cwd() != Path(__file__).parents[2]:  # there a random.py would be the user's own, and taken for the library
        os.environ[SAFE] = "1"
    try:
        with _forked_where_possible():
            forkserver.ensure_running()
    finally:
        os.environ.pop(SERVED, None)
        os.environ.pop(SAFE, None)
        if before is not None:
            os.environ[SAFE] = before
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return context


def start(process: Any) -> None:
    """Start a process of the context; once more where the server was killed just now, and has perhaps not quite ended.

    Raises:
        ConnectionError, EOFError: it was killed again.
    """
    try:
        process.start()
    except (ConnectionError, EOFError):
        time.sleep(ENDING)
        process.start()


def _choose_folder() -> None:
    """Where the server listens: the temporary folder, but /tmp for one whose path is too long for a socket."""
    typed = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST:
        tempfile.tempdir = "/tmp"
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = typed


@contextmanager
def _forked_where_possible() -> Iterator[None]:
    """Within this block a server that Python would start is this process's spare, if it has one that lives."""
    python: Any = util
    start_cold = python.spawnv_passfds

    def start(path: str, words: Sequence[str], fds: Sequence[int]) -> int:
        global _spare
        if "multiprocessing.forkserver" not in words[-1]:  # a resource tracker was killed just now
            return int(start_cold(path, words, fds))
        spare, _spare = _spare, None
        if spare is not None:
            pid, line = spare
            with line, suppress(OSError, EOFError):  # it was killed
                line.send((words[-1], fds, dict(os.environ), os.sched_getaffinity(0)))
                for fd in fds:
                    reduction.send_handle(line, fd, pid)
                if line.poll(ANSWER):
                    line.recv()
                    return pid
            with suppress(OSError):  # or is stopped
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return int(start_cold(path, words, fds))

    python.spawnv_passfds = start
    try:
        yield
    finally:
        python.spawnv_passfds = start_cold


def _fork_spare() -> None:
    """Fork what will be this process's server if it needs one; nothing where a user's script has started threads."""
    global _spare
    parent = os.getpid()
    with suppress(OSError):  # it may have no more processes or files now: a server is started when it is needed
        if len(os.listdir("/proc/self/task")) > 1:
            return
        ours, theirs = Pipe()
        with theirs:
            pid = os.fork()
            if pid == 0:
                _be_spare(theirs, parent)
            _spare = pid, ours


def _be_spare(line: Connection, parent: int) -> NoReturn:
    """Wait until the parent wants its server, and be that: the same command, with the same files and variables."""
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        family.die_with_parent(parent)
        for fd in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, line.fileno()}:
            with suppress(OSError):  # the listing's own
                os.close(fd)
        command, numbers, environment, cores = line.recv()
        above, moved = max(line.fileno(), *numbers) + 1, []
        for _ in numbers:
            received = reduction.recv_handle(line)
            moved.append(fcntl.fcntl(received, fcntl.F_DUPFD, above))
            os.close(received)
        line.send(None)
        line.close()
        for number, fd in zip(numbers, moved, strict=True):
            os.dup2(fd, number, inheritable=False)
            os.close(fd)
        os.environ.clear()
        os.environ.update(environment)
        with suppress(OSError):  # a core is gone
            os.sched_setaffinity(0, cores)
        from trainer.processes import preload

        preload.begin_server()
        exec(command, {})
    except (EOFError, SystemExit):  # the parent ended
        code = 0
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def begin_worker() -> None:
    """In a new worker: leave signals to the process that it works for, and go when that goes, however it goes.

    The server's child is killed with the server, and the server ends with the process that it serves.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _leave_server()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def begin_rank() -> None:
    """In a new rank, which has handlers: receive signals, and go when the launcher goes, as a worker does."""
    os.environ[family.PARENT] = str(os.getppid())
    _leave_server()
    _fork_spare()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _leave_server() -> None:
    """Let the server end though this child of it hangs, and end with it and with whom it serves."""
    server: Any = forkserver._forkserver
    alive = server._forkserver_alive_fd
    if alive is not None:  # the server waits until all have closed it; a worker that hangs would keep it for ever
        os.close(alive)
        server._forkserver_alive_fd = server._forkserver_address = None
    family.die_with_parent(os.getppid())
    served = multiprocessing.parent_process()
    if served is None or not served.is_alive():  # it died before we asked
        os._exit(1)

"""The one fork server of a process: loader and pool workers and our ranks are forked from it, in milliseconds.

This process itself is not forked: after OpenMP or CUDA has started, the child hangs. Signals that reach the whole
process group (Ctrl-C, torchrun's SIGTERM, a terminal that closes) mean the parent, which still finishes its step and
saves: they are blocked from the server's first moment on, and in its children until those ignore them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from trainer.processes import early, family, pickling

SIGNALS = {signal.SIGINT, signal.SIGTERM, *early.SAVE_AND_GO}
ENDING = 0.5  # seconds that a killed process takes to end, at most
GONE = 255  # the exit code that multiprocessing gives a worker whose server is gone
SAFE = "PYTHONSAFEPATH"  # Python's variable: the working folder is not where modules come from
LONGEST = 70  # bytes of a folder's path; a socket's may have 107, of which Python needs 32
SERVED = "TRAINER_FORK_PARENT"  # whom the server dies with, or 0


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
    import torch

    usual = ForkingPickler._extra_reducers[torch.UntypedStorage]  # type: ignore[attr-defined]  # torch's own
    kept = list[torch.UntypedStorage]()  # tensors that pickling makes, as of a generator: until the process has them

    def reduced(storage: torch.UntypedStorage) -> Any:
        kept.append(storage)
        return usual(storage)

    ForkingPickler.register(torch.UntypedStorage, reduced)
    try:
        process.start()
    except (ConnectionError, EOFError):
        time.sleep(ENDING)
        process.start()
    finally:
        ForkingPickler.register(torch.UntypedStorage, usual)


def _choose_folder() -> None:
    """Where the server listens: the temporary folder, but /tmp for one whose path is too long for a socket."""
    typed = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST:
        tempfile.tempdir = "/tmp"
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = typed


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

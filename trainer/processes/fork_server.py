"""Fork server, from which loader workers, pool workers and ranks are forked in milliseconds.

This process itself cannot be forked, because a child that is forked after OpenMP or CUDA has
started hangs. Signals to the whole process group (Ctrl-C, torchrun's SIGTERM, a closed terminal)
are meant for the parent, which still finishes its step and saves. They are therefore blocked in the
server from its start, and in each child until the child ignores or handles them.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from trainer.processes import early, family, pickling
from trainer.processes.silence import call_within

# The standard library's object for its fork server, which has no public name or type.
SERVER: Any = forkserver._forkserver
# Signals that are blocked in the server. A worker ignores them, and a rank handles them.
SIGNALS = {signal.SIGINT, signal.SIGTERM, *early.SAVE_AND_GO}
# Number of seconds to wait for the exit of a server that was stopped or killed.
EXIT_SECONDS = 0.5
# Exit code that multiprocessing reports for a worker whose server is gone.
SERVER_GONE_CODE = 255
# Environment variable that keeps Python from importing modules from the working directory.
SAFE = "PYTHONSAFEPATH"
# Maximum length in bytes of the temporary directory's path; with a longer path, the server's socket
# is in /tmp. The path of a socket has at most 107 bytes, and Python appends up to 32.
MAX_FOLDER_LENGTH = 70
# Environment variable of a new server: id of the process with which the server dies, or 0 if the
# kernel must not kill the server (see `start_server`).
SERVED_PID = "TRAINER_FORK_PARENT"


def start_server(*preload: str) -> Any:
    """Start the fork server unless it runs, and return the multiprocessing context for workers.

    Args:
        preload: modules that the server imports in addition to torch. The list has no effect if
            the server already runs, or if the user's program has chosen modules. The server also
            imports torchvision and `photo_reader` if this process has imported them, which saves
            each worker two seconds.
    """
    pickling.forget_stdin()
    context = multiprocessing.get_context("forkserver")
    # If the user's program has chosen modules, its list is kept. The default list is replaced,
    # because it would import `__main__`, which may have any side effect.
    if SERVER._preload_modules == ["__main__"]:
        optional = ("torchvision", "trainer.data.photos.photo_reader")
        imported = [name for name in optional if name in sys.modules]
        modules = dict.fromkeys([*preload, *imported])
        context.set_forkserver_preload(["trainer.processes.preload", "torch", *modules])
    # Python's resource tracker must survive Ctrl-\ (SIGQUIT), because a second tracker would print
    # a stack for each semaphore of the first one.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNALS, signal.SIGQUIT})
    before = os.environ.get(SAFE)
    try:
        # Starting the tracker unblocks SIGINT and SIGTERM, so the mask is set again afterwards.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, {*mask, *SIGNALS})
        # The server dies with this process only if the main thread starts the server. A server that
        # another thread starts would be killed as soon as that thread ends.
        is_main_thread = threading.current_thread() is threading.main_thread()
        os.environ[SERVED_PID] = str(os.getpid() if is_main_thread else 0)
        _choose_folder()
        # Keep the server from importing from the working directory, where a file such as random.py
        # would hide the module of the standard library. If `trainer` itself is imported from there,
        # the server needs it.
        if Path.cwd() != Path(__file__).parents[2]:
            os.environ[SAFE] = "1"
        forkserver.ensure_running()
    finally:
        os.environ.pop(SERVED_PID, None)
        os.environ.pop(SAFE, None)
        if before is not None:
            os.environ[SAFE] = before
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return context


def start_process(process: Any) -> None:
    """Start a process, and try again if the fork server has just been killed.

    Args:
        process: process of a multiprocessing context that has not been started.

    Raises:
        ConnectionError, EOFError: the server was killed during the second try, too.
    """
    import torch

    torch_reduce = ForkingPickler._extra_reducers[torch.UntypedStorage]  # type: ignore[attr-defined]
    # Pickling may create tensors, such as the state of a generator. Their storages must stay alive
    # until the process has received them.
    storages = []

    def reduce_storage(storage: torch.UntypedStorage) -> Any:
        storages.append(storage)
        return torch_reduce(storage)

    ForkingPickler.register(torch.UntypedStorage, reduce_storage)
    try:
        process.start()
    except (ConnectionError, EOFError):
        time.sleep(EXIT_SECONDS)
        process.start()
    finally:
        ForkingPickler.register(torch.UntypedStorage, torch_reduce)


def stop_server() -> None:
    """Stop the server, and wait at most `EXIT_SECONDS` until it has exited.

    The kernel then adds the CPU time of the server's children to that of this process. The command
    `compare` needs this sum to distinguish the children from unrelated processes.
    """
    # A server whose child hangs does not exit, so the wait has a limit.
    with suppress(ChildProcessError, TimeoutError):
        call_within(EXIT_SECONDS, SERVER._stop)


def _choose_folder() -> None:
    """Choose the folder for the server's socket.

    The folder is in the temporary directory, or in /tmp if the path of the temporary directory is
    too long for a socket.
    """
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > MAX_FOLDER_LENGTH:
        tempfile.tempdir = "/tmp"
    try:
        # multiprocessing remembers the folder that it creates here.
        util.get_temp_dir()
    finally:
        tempfile.tempdir = before


def begin_worker() -> None:
    """Set up a new worker, which ignores signals and dies with the process that it works for.

    The kernel kills the worker with the server, and the server with the process that it serves, if
    the main thread of that process started the server.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _leave_server()


def begin_rank() -> None:
    """Set up a new rank, which dies with its launcher.

    Signals are unblocked, so the caller must have installed handlers.
    """
    os.environ[family.PARENT] = str(os.getppid())
    _leave_server()


def _leave_server() -> None:
    """Disconnect a child from the server, so that the server can exit even if the child hangs.

    The kernel kills the child when the server dies. Afterwards its signals are unblocked.
    """
    alive_fd = SERVER._forkserver_alive_fd
    # The server exits when all processes have closed this descriptor.
    if alive_fd is not None:
        os.close(alive_fd)
        SERVER._forkserver_alive_fd = None
        SERVER._forkserver_address = None
    family.die_with_parent(os.getppid())
    served = multiprocessing.parent_process()
    # The served process may have died before this child could ask to die with it.
    if served is None or not served.is_alive():
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

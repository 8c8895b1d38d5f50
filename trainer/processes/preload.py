"""First import of a fork server, which ties the life of the server to that of its parent.

If the main thread of a process starts the server, the kernel kills the server when that process
dies. In any case it kills the server's children when the server dies. Without this module, the
server would notice the death of its parent only after it has imported all modules and all its
children have exited.
"""

import atexit
import os
import sys
import traceback
from types import TracebackType

from trainer.processes import family, fork_server
from trainer.processes.interrupts import exit_now

# Process id of this process if it is a fork server, else 0.
_server = 0


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception of a child, unless it means that the parent has exited.

    If the parent exits while the child starts, the child fails inside multiprocessing, because the
    pipes and files for its start are gone.
    """
    # The module of the last frame, which raised the exception.
    module = ""
    for frame, _ in traceback.walk_tb(trace):
        module = str(frame.f_globals.get("__name__"))
    is_missing_file = issubclass(kind, (EOFError, FileNotFoundError))
    if not is_missing_file or not module.startswith("multiprocessing."):
        sys.__excepthook__(kind, error, trace)


def _begin_child() -> None:
    """Let a new child of a fork server die with the server.

    Children of other processes that have imported this module are not affected.
    """
    global _server
    server = _server
    _server = 0
    if server:
        family.die_with_parent(server)


sys.excepthook = show
# Children live until the server has exited, so its exit must be fast. Python's own shutdown takes
# seconds after torch was imported.
atexit.register(lambda: exit_now(0) if _server else None)
os.register_at_fork(after_in_child=_begin_child)
# `start_server` sets this variable for a new fork server only. Its value is the id of the process
# whose death kills the server, or 0 if the kernel shall not kill the server.
if fork_server.SERVED_PID in os.environ:
    _server = os.getpid()
    # Children of the server must not inherit the setting.
    os.environ.pop(fork_server.SAFE, None)
    if parent := int(os.environ.pop(fork_server.SERVED_PID)):
        family.die_with_parent(parent)

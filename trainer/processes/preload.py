"""What a fork server imports first: it dies with the process that started it, and what it forks dies with it.

By itself it would notice only when it has imported everything, and when all its children have noticed.
"""

import atexit
import os
import sys
import traceback
from types import TracebackType

from trainer.processes import family, fork_server
from trainer.processes.interrupts import exit_now

_server = 0  # this process's id, where it is a fork server


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Errors of children, but for that of one whose parent ended as it was started, and took along what it needs."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    last = str(frames[-1].f_globals.get("__name__")) if frames else ""
    if not (issubclass(kind, (EOFError, FileNotFoundError)) and last.startswith("multiprocessing.")):
        sys.__excepthook__(kind, error, trace)


def _begin_child() -> None:
    """In what any process forks that has imported this: a server's child dies with it, others as they like."""
    global _server
    server, _server = _server, 0
    if server:
        family.die_with_parent(server)


sys.excepthook = show
# Its children live until it is gone, and with torch the interpreter's shutdown takes seconds.
atexit.register(lambda: exit_now(0) if _server else None)
os.register_at_fork(after_in_child=_begin_child)
if fork_server.SERVED in os.environ:  # in a new fork server, which dies with the process that it serves
    _server = os.getpid()
    os.environ.pop(fork_server.SAFE, None)  # of what the children start
    if parent := int(os.environ.pop(fork_server.SERVED)):
        family.die_with_parent(parent)

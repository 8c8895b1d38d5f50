"""Commands that this process starts, and that never outlive it, however it ends.

Workers that are forked come from `fork_server`, ranks from torch's own launcher.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from trainer.errors import SetupError
from trainer.processes.family import PARENT


@contextmanager
def started(
    command: Sequence[str],
    leaves: Callable[[subprocess.Popen[str]], object] | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: int | IO[str] | None = None,
    stdout: int | IO[str] | None = None,
    stderr: int | IO[str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Run a command within this block; behind the block it has ended.

    Args:
        command: a command of ours. It asks the kernel to die with this process (`family.die_with_parent`).
        leaves: what waits for its end once Ctrl-C was passed on to it. None: Ctrl-C here kills it.
        environment: its variables, but for the one that names this process; None: this process's.
        stdin, stdout, stderr: as `subprocess.Popen` takes them, in text.

    Raises:
        SetupError: it cannot be started.
    """
    variables = {**(os.environ if environment is None else environment), PARENT: str(os.getpid())}
    try:
        # A session of its own: Ctrl-C reaches it once, from here.
        child = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            env=variables,
            start_new_session=True,
        )
    except OSError as error:
        raise SetupError(f"{command[0]} cannot be started ({error.strerror})") from None
    try:
        yield child
    except KeyboardInterrupt:
        if leaves is not None:
            child.send_signal(signal.SIGINT)
            leaves(child)
        raise
    finally:
        if child.poll() is None:
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()
            child.wait()


def start_beside(command: Sequence[str], fd: int, blocked: Iterable[int]) -> subprocess.Popen[bytes]:
    """A command that has one of this process's files, and ends by itself at the end of its stdin, which never blocks.

    It stays in this process's group, and does not receive the signals `blocked` that mean this process.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[fd], bufsize=0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert child.stdin is not None
    os.set_blocking(child.stdin.fileno(), False)
    return child

"""Parents and siblings as the kernel knows them: who dies with whom, which rank lives, which is stopped. Linux only.

A rank that is gone or stopped cannot say so. Its siblings see it: they have the same launcher for a parent. Commands
that this process starts never outlive it; workers and ranks that are forked come from `fork_server`, ranks on behalf of
torch's launcher.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from trainer.errors import PeerError, SetupError
from trainer.processes.rank import place

# Set by our launcher for its ranks and for whatever else we start: whom to die with; and who speaks for the ranks.
PARENT = "TRAINER_PARENT"
PARENT_DIED = 7  # the exit code of a child that finds no parent
# And its number: what the kernel calls a rank that was forked, whose first environment is another's.
RANK_NAME = "rank "
STACKS = signal.SIGURG  # a rank that gets it writes its stacks to stderr, and goes on; no other process minds it


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies, however it dies; or leave, if it is dead already.

    To the kernel a parent is the thread that started this process.

    Args:
        parent: process id. None: of whoever of ours started this, or any torchrun. What a user started by himself may
            outlive his shell.
    """
    if parent is None:
        named = os.environ.get(PARENT, "")
        if not named and not place().launched:
            return
        parent = int(named) if named.isdigit() else None
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # 1: PR_SET_PDEATHSIG
    now = os.getppid()
    if now != parent if parent is not None else _orphaned(now):  # it died before we asked
        os._exit(PARENT_DIED)


def launcher_prints() -> bool:
    """Whether a launcher of ours prints for this rank."""
    return PARENT in os.environ and place().launched


def _orphaned(parent: int) -> bool:
    """Whether torchrun, which names no parent, died before this rank asked, so that it has another one.

    Who adopts orphans (init, a container's first process, a session's manager) has neither torch in its memory, as
    torchrun has, nor a rank's variables, as a command between torchrun and this process has.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not os.path.isdir(f"/proc/{parent}"):
        return False  # 0, say: a parent outside this container, where nobody adopts
    with suppress(OSError):
        return b"libtorch" not in _read(parent, "maps") and b"\0TORCHELASTIC_RUN_ID=" not in _read(parent, "environ")
    with suppress(OSError):  # who may not look into another user's process may still see its command
        return b"python" not in _read(parent, "cmdline")
    return False


def _read(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def living_ranks() -> dict[int, tuple[int, str]]:
    """Ranks of this machine that live, this one too: rank -> process id, and the kernel's letter for its state."""
    ranks: dict[int, tuple[int, str]] = {}
    if "RANK" not in os.environ or not os.path.isdir("/proc"):
        return ranks
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, ValueError):  # it ended meanwhile, or is not ours to look at
            state, parent = _read(int(pid), "stat").decode(errors="replace").rpartition(")")[2].split()[:2]
            if int(parent) == os.getppid() and state not in "ZX":
                name = _read(int(pid), "comm").decode(errors="replace").strip()
                words = _read(int(pid), "environ").decode(errors="replace").split("\0")
                rank = [word[5:] for word in words if word.startswith("RANK=")]
                if name.startswith(RANK_NAME):
                    rank = [name.removeprefix(RANK_NAME)]
                if rank:
                    ranks[int(rank[0])] = int(pid), state
    return ranks


def resume_stopped() -> list[int]:
    """Let stopped siblings write their stacks and run again, so that they find their peers gone and leave; their ranks.

    No other signal would: a stopped process receives none but SIGKILL, which torchrun sends after 30 s.
    """
    stopped = {rank: pid for rank, (pid, state) in living_ranks().items() if state == "T"}
    for pid in stopped.values():
        with suppress(OSError):
            os.kill(pid, STACKS)
            os.kill(pid, signal.SIGCONT)
    return sorted(stopped)


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


def at_once(
    commands: Sequence[Sequence[str]],
    environment: Mapping[str, str],
    output: IO[str] | None = None,
    seconds: float = math.inf,
) -> list[int | None]:
    """Exit codes of commands that run together; one that fails ends others: None. Raises PeerError after `seconds`."""
    end, beside = time.monotonic() + seconds, None if output is None else subprocess.STDOUT
    with ExitStack() as stack:
        running = [
            stack.enter_context(started(command, None, environment, subprocess.DEVNULL, output, beside))
            for command in commands
        ]
        while None in (codes := [child.poll() for child in running]) and not any(codes):
            if time.monotonic() > end:
                raise PeerError(f"it did not end within {seconds:.0f} s")
            time.sleep(0.02)
    return codes


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

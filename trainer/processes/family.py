"""Parents, siblings and children of this process, as the kernel reports them. Linux only.

A rank that is gone or stopped cannot report its own state. Its siblings, the ranks with the same
launcher as parent, find out from the kernel. Commands that this process starts never outlive it.
Workers and ranks are forked by `fork_server` instead.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any

from trainer.errors import PeerError, SetupError
from trainer.processes.rank import read_place, read_process_file
from trainer.processes.watchdog_process import WATCHDOG_SIGNAL

# Environment variable of the ranks and commands that `trainer` starts: process id of the parent.
# `die_with_parent` reads it, so that the process dies when this parent dies. A rank with this
# variable does not print how it ended, because our launcher does.
PARENT = "TRAINER_PARENT"
# Exit code of a child that finds in `die_with_parent` that its parent is already dead.
PARENT_DIED = 7
# A forked rank sets its process name to this prefix and its rank number. Other processes cannot
# read RANK of a forked rank in /proc, which shows the environment of the fork server instead.
RANK_NAME = "rank "
# The likely cause of death by each signal, if nobody sent the signal on purpose. Messages append
# the cause to the name of the signal.
CAUSES = {
    "SIGKILL": " (the system may be short of memory)",
    "SIGABRT": " (NCCL does this if another rank is lost or silent; so does a library that finds "
    "an internal error)",
    "SIGSEGV": " (a fault in torch or another library)",
    WATCHDOG_SIGNAL.name: " (its Python did not run after a signal)",
    "SIGBUS": " (/dev/shm or a disk that is mapped may be full)",
}
# A rank that receives this signal writes its stacks to stderr and continues. The default action of
# SIGURG is to ignore it, so it does not harm other processes.
STACKS = signal.SIGURG


def die_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent dies.

    If the parent is already dead, this process exits. The kernel sends the signal when the thread
    that started this process ends, even if other threads of the parent process live on.

    Args:
        parent: process id of the parent. None selects the process of `trainer` or of torchrun that
            has started this process. None does nothing in a process that the user has started,
            because such a process may outlive its parent.
        number: signal that the kernel sends.
    """
    if parent is None:
        named = os.environ.get(PARENT, "")
        if not named and not read_place().launched:
            return
        parent = int(named) if named.isdigit() else None
    if sys.platform == "linux":
        # The first argument is PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(1, number, 0, 0, 0)
    # The parent may have died before the call, in which case the kernel sends nothing.
    current = os.getppid()
    is_dead = _is_adopted(current) if parent is None else current != parent
    if is_dead:
        os._exit(PARENT_DIED)


def launcher_prints() -> bool:
    """Return whether our launcher started this rank, and so prints how the rank ended."""
    return PARENT in os.environ and read_place().launched


def _is_adopted(parent: int) -> bool:
    """Return whether the torchrun of this rank has died, so that the rank has another parent.

    Ranks do not know the process id of torchrun, so the parent is identified by other signs. The
    process of torchrun has mapped torch's libraries, and a command between torchrun and this
    process has the environment variables of a rank. The processes that adopt orphans (init, the
    first process of a container, a session manager) have neither.

    Args:
        parent: process id of the current parent.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not os.path.isdir(f"/proc/{parent}"):
        # A parent outside of this container has the id 0. Orphans are not adopted from outside, so
        # such a parent is still the first one.
        return False
    with suppress(OSError):
        if "libtorch" in read_process_file(parent, "maps"):
            return False
        return "\0TORCHELASTIC_RUN_ID=" not in read_process_file(parent, "environ")
    # The command line is readable even if the process belongs to another user. torchrun is a Python
    # program, so a parent without "python" in its command line is not torchrun.
    with suppress(OSError):
        return "python" not in read_process_file(parent, "cmdline")
    return False


def living_ranks() -> dict[int, tuple[int, str]]:
    """Find the living ranks with the same parent process as this rank, including this rank.

    No ranks are found if this process is not a rank, or if the system has no /proc.

    Returns:
        (process id, state) by rank. The state is a letter as in /proc, such as "T" for stopped.
    """
    ranks: dict[int, tuple[int, str]] = {}
    if "RANK" not in os.environ or not os.path.isdir("/proc"):
        return ranks
    for pid in filter(str.isdigit, os.listdir("/proc")):
        # Skip a process that exits during this loop, or that belongs to another user.
        with suppress(OSError, ValueError):
            state, parent = read_process_file(pid, "stat").rpartition(")")[2].split()[:2]
            if int(parent) != os.getppid() or state in "ZX":
                continue
            name = read_process_file(pid, "comm").strip()
            variables = read_process_file(pid, "environ").split("\0")
            numbers = [entry[5:] for entry in variables if entry.startswith("RANK=")]
            if name.startswith(RANK_NAME):
                numbers = [name.removeprefix(RANK_NAME)]
            if numbers:
                ranks[int(numbers[0])] = int(pid), state
    return ranks


def resume_stopped() -> list[int]:
    """Let stopped siblings write their stacks and continue, so that they notice a lost peer.

    While a process is stopped, it handles no signal except SIGKILL, which torchrun sends after
    30 s.

    Returns:
        The ranks that were stopped.
    """
    stopped = {rank: pid for rank, (pid, state) in living_ranks().items() if state == "T"}
    for pid in stopped.values():
        with suppress(OSError):
            os.kill(pid, STACKS)
            os.kill(pid, signal.SIGCONT)
    return sorted(stopped)


def describe_exit(code: int) -> str:
    """Describe how a process ended.

    Args:
        code: exit code. A negative code is the number of the signal that killed the process.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}{CAUSES.get(name, '')}"


@contextmanager
def run_command(
    command: Sequence[str], environment: Mapping[str, str], **streams: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a command at the beginning of this block, and kill it at the end of the block.

    Args:
        command: a command that calls `die_with_parent`, so that it also dies with this process.
        environment: environment variables of the command, to which `PARENT` is added.
        streams: stdin, stdout and stderr in text mode, for `subprocess.Popen`.

    Raises:
        SetupError: the command cannot be started.
    """
    variables = {**environment, PARENT: str(os.getpid())}
    try:
        # A new session keeps the terminal from sending Ctrl-C to the child, too.
        child = subprocess.Popen(
            command, text=True, errors="replace", env=variables, start_new_session=True, **streams
        )
    except OSError as error:
        raise SetupError(f"{command[0]} cannot be started ({error.strerror})") from None
    try:
        yield child
    finally:
        if child.poll() is None:
            # The child may exit between the two calls.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()
            child.wait()


def run_together(
    commands: Sequence[Sequence[str]],
    environment: Mapping[str, str],
    output: IO[str],
    seconds: float,
) -> list[int | None]:
    """Run commands at the same time until all have succeeded or one has failed.

    Args:
        commands: commands as for `run_command`.
        environment: environment variables.
        output: file for stdout and stderr.
        seconds: timeout.

    Returns:
        The exit code of each command, or None for a command that was killed because another one
        failed.

    Raises:
        PeerError: the commands did not end in time.
    """
    end = time.monotonic() + seconds
    with ExitStack() as stack:
        running = []
        for command in commands:
            process = run_command(
                command,
                environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            running.append(stack.enter_context(process))
        while True:
            codes = [child.poll() for child in running]
            if None not in codes or any(codes):
                return codes
            if time.monotonic() > end:
                raise PeerError(f"it did not end within {seconds:.0f} s")
            time.sleep(0.02)


def start_companion(
    command: Sequence[str], fd: int, blocked: Iterable[int]
) -> subprocess.Popen[bytes]:
    """Start a command that shares a file with this process.

    The command must exit when its stdin is closed. This process can write to that stdin without
    blocking. The command stays in the process group of this process.

    Args:
        command: the command.
        fd: descriptor of the shared file.
        blocked: signals to the process group that the command must not receive.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[fd], bufsize=0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert child.stdin is not None
    os.set_blocking(child.stdin.fileno(), False)
    return child

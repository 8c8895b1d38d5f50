"""Parents and siblings as the kernel knows them: who dies with whom, which rank lives, which is stopped. Linux only.

A rank that is gone or stopped cannot say so. Its siblings see it: they have the same launcher for a parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from trainer.processes.rank import place

# Set by our launcher for its ranks and for whatever else we start: whom to die with; and who speaks for the ranks.
PARENT = "TRAINER_PARENT"
PARENT_DIED = 7  # the exit code of a child that finds no parent
STACKS = signal.SIGUSR2  # a rank that gets it writes its stacks to stderr, and goes on


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies, however it dies; or leave, if it is dead already.

    To the kernel a parent is the thread that started this process.

    Args:
        parent: process id. None: of whoever of ours started this, or any torchrun. What a user started by himself may
            outlive his shell.
    """
    if parent is None:
        named = os.environ.get(PARENT)
        if named is None and not place().launched:
            return
        parent = int(named) if named and named.isdigit() else os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # 1: PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before we asked
        os._exit(PARENT_DIED)


def living() -> dict[int, tuple[int, str]]:
    """Ranks of this machine that live, this one too: rank -> process id, and the kernel's letter for its state."""
    found: dict[int, tuple[int, str]] = {}
    if "RANK" not in os.environ or not os.path.isdir("/proc"):
        return found
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, ValueError):  # it ended meanwhile, or is not ours to look at
            state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getppid() and state not in "ZX":
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                rank = [word[5:] for word in words if word.startswith(b"RANK=")]
                if rank:
                    found[int(rank[0])] = int(pid), state
    return found


def wake() -> list[int]:
    """Let stopped siblings write their stacks and run again, so that they find their peers gone and leave too.

    Returns:
        Their ranks. Nobody else would: a stopped process hears no signal but SIGKILL, which torchrun sends after 30 s.
    """
    stopped = {rank: pid for rank, (pid, state) in living().items() if state == "T"}
    for pid in stopped.values():
        with suppress(OSError):
            if _handles(pid, STACKS):
                os.kill(pid, STACKS)
            os.kill(pid, signal.SIGCONT)
    return sorted(stopped)


def _handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, that would end it otherwise."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False

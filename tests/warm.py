"""Processes that have imported torch already: `Popen` and `run` are like those of subprocess,
without the seconds of that import.

They are forked by a nursery (see `tests.nursery`), as children of whoever asks. To the kernel such
a process has its nursery's command line: what searches for that line, or what Python does before
the first import, takes a process of subprocess's own.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

# Ignored in a nursery, for its whole group gets them.
DEAF = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NURSERY = "nursery"  # Name of a nursery in /proc.
ROOM = 30_000  # bytes for the environments of all that is forked
_execute = subprocess.Popen._execute_child
_spawn = util.spawnv_passfds
_asking = threading.Lock()
_nursery: socket.socket | None = None  # the line to this process's


class Popen(subprocess.Popen):
    """Start a process like subprocess.Popen, for `[sys.executable, ...]`.

    A process that cannot be warm is started as usual.
    """

    def _execute_child(self, *given, **named) -> None:
        _execute_child(self, *given, **named)


# The streams are those of this `Popen`, like subprocess's.
run = types.FunctionType(subprocess.run.__code__, {**vars(subprocess), "Popen": Popen})
run.__kwdefaults__ = subprocess.run.__kwdefaults__


def start_all_warm() -> None:
    """Start all Python processes of this process warm from now on."""
    subprocess.Popen._execute_child = _execute_child
    util.spawnv_passfds = spawnv_passfds


def start_requested_warm() -> None:
    """Start only multiprocessing's servers warm from now on, and processes of `Popen` and `run`."""
    subprocess.Popen._execute_child = _execute
    util.spawnv_passfds = spawnv_passfds


def start_none_warm() -> None:
    """Start all processes like Python does from now on."""
    subprocess.Popen._execute_child = _execute
    util.spawnv_passfds = _spawn


def without_nursery(pids: Iterable[str]) -> list[str]:
    """Return the living processes without nurseries, which do not exist with subprocess."""
    collected = []
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() != NURSERY:
                collected.append(pid)
    return collected


def ask(nursery: socket.socket) -> None:
    """Use this nursery for this process from now on."""
    global _nursery
    _nursery = nursery


def _start_nursery() -> None:
    """A test process's, which has to import torch; gone with that process."""
    from tests.command_line import environment

    ours, reference = socket.socketpair()
    script = f"from tests.nursery import serve; serve({reference.fileno()})"
    command = [sys.executable, "-c", script]
    # The folder is used by every test: imported modules write there.
    first = environment(TMPDIR=tempfile.gettempdir(), ROOM=" " * ROOM)
    subprocess.Popen(
        command,
        pass_fds=[reference.fileno()],
        env=first,
        stdin=subprocess.DEVNULL,
    )
    reference.close()
    ask(ours)


def _start(
    command: tuple[str, str, list[str]],
    files: Mapping[int, int],
    **job: object,
) -> int:
    """Have a command forked as a child of this process, with its files by number, and what `exec`
    would leave it.
    """
    mask = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    ignored = [number for number in DEAF if signal.getsignal(number) is signal.SIG_IGN]
    asked = {
        "command": command,
        "numbers": [*files],
        "parent": os.getpid(),
        "mask": mask,
        "ignored": ignored,
    }
    asked |= {
        "environment": {**os.environ},
        "cwd": os.getcwd(),
        "session": False,
        "serves": False,
    }
    with _asking:
        if _nursery is None:
            _start_nursery()
        socket.send_fds(_nursery, [b"x"], [*files.values()])
        _nursery.sendall(json.dumps({**asked, **job}).encode() + b"\n")
        answer = _nursery.makefile().readline()
    if not answer:
        raise RuntimeError(
            "the nursery is gone: `python -c 'from tests.nursery import serve'` may say why"
        )
    return int(answer)


def received(wire: socket.socket) -> tuple[dict, list[int]] | None:
    """Return a request to a nursery with its files, or None if the other end is closed."""
    data, fds, _, _ = socket.recv_fds(wire, 1, 16)
    return (json.loads(wire.makefile().readline()), fds) if data else None


def _warm(words: Sequence[str]) -> tuple[str, str, list[str]] | None:
    """Return what Python should run, with its arguments, or None if it has to be a new process."""
    if words[0] != sys.executable or len(words) < 2:
        return None
    rest = [*words[1:]]
    while rest[0] in ("-u", "-B"):
        rest.pop(0)
    if rest[0] in ("-m", "-c"):
        return rest[0], rest[1], rest[2:]
    if rest[0] == "-":
        return "-", "", rest[1:]
    return None if rest[0].startswith("-") else ("file", rest[0], rest[1:])


def _execute_child(process: subprocess.Popen, *given, **named) -> None:
    """Fork Python's commands, and start other programs like `subprocess` does."""
    asked = inspect.signature(_execute).bind(process, *given, **named).arguments
    args = asked["args"]
    command = None if isinstance(args, str) else _warm([*map(os.fsdecode, args)])
    if (
        command is None
        or asked["pass_fds"]
        or asked["preexec_fn"]
        or asked.get("process_group", -1) != -1
    ):
        _execute(process, *given, **named)
        return
    pipes = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    environment = os.environ if asked["env"] is None else asked["env"]
    files = {stream: fd if fd >= 0 else stream for stream, fd in enumerate(pipes)}
    process.pid = _start(
        command,
        files,
        environment={**environment},
        cwd=os.path.abspath(asked["cwd"] or "."),
        session=asked["start_new_session"],
    )
    process._child_created = True
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(asked[name] for name in ends))


def spawnv_passfds(path: str, args: list[str], passfds: list[int]) -> int:
    """The same for multiprocessing's servers."""
    command = _warm([os.fsdecode(word) for word in args])
    if command is None:
        return _spawn(path, args, passfds)
    return _start(
        command,
        {fd: fd for fd in (0, 1, 2, *passfds)},
        serves=True,
    )

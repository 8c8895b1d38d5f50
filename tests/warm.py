"""A process that has imported what `python -m trainer` imports, and forks a child for each command.

The child runs the same module as `python -m trainer` would, with its own words, environment, folder and output; only
the seconds of importing torch are saved. It forks before any thread of OpenMP or gloo exists.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys

PRELOADED = ["trainer.training", "torch.distributed.run", "torch.utils.tensorboard", "sklearn.datasets"]


class Warm:
    """The server, started at first use, gone with this process."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._ours, theirs = socket.socketpair()
        script = f"from tests.warm import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", script], pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
        )
        theirs.close()

    def run(self, words: list[str], environment: dict[str, str], cwd: str, out: int, err: int, timeout: float) -> int:
        """Run a command with its output in the files `out` and `err`; returns its exit code, negative for a signal."""
        ours, theirs = socket.socketpair()
        with ours:
            socket.send_fds(self._ours, [b"x"], [theirs.fileno(), out, err])
            theirs.close()
            ours.sendall(json.dumps([words, environment, cwd]).encode() + b"\n")
            ours.settimeout(timeout)
            answers = ours.makefile()
            try:
                pid = int(answers.readline())
                return int(answers.readline())
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(words, timeout) from None


def serve(number: int) -> None:
    """Answer until the other side is gone."""
    for name in PRELOADED:
        __import__(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who answer
    asked = socket.socket(fileno=number)
    while True:
        data, fds, _, _ = socket.recv_fds(asked, 1, 3)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            asked.close()
            _answer(*fds)
            os._exit(0)
        for fd in fds:
            os.close(fd)


def _answer(number: int, out: int, err: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asked = socket.socket(fileno=number)
    words, environment, cwd = json.loads(asked.makefile().readline())
    child = os.fork()
    if child == 0:
        asked.close()
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[0] = cwd
        sys.argv = ["trainer", *words]
        importlib.reload(sys.modules["trainer.faults"])  # which looks at the environment once
        _run()
    asked.sendall(f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    asked.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _run() -> None:
    """As the interpreter does: the module, its exit code, and what is to be done at exit."""
    import atexit
    import traceback

    code = 0
    try:
        runpy.run_module("trainer", run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

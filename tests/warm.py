"""A process that has imported what `python -m trainer` imports, and forks a child for each command.

The child runs the same module as `python -m trainer` would, with its own words, environment, folder and output; only
the seconds of importing torch are saved. It forks before any thread of OpenMP or gloo exists. What it starts itself,
the ranks of a launcher, the probes of a plan and its fork server, runs in children that it forked at its beginning and
that waited.
"""

from __future__ import annotations

import fcntl
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import util

PRELOADED = ["trainer.training.loop", "torch.distributed.run", "torch.utils.tensorboard", "sklearn.datasets"]
SPARES = 6  # children that a command may start; further ones import torch themselves
ABOVE = 900  # no process here has as many files
_execute = subprocess.Popen._execute_child
_spawn = util.spawnv_passfds
_spares: list[tuple[int, socket.socket]] = []  # this process's


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
            answers, pid = ours.makefile(), None
            try:
                pid = int(answers.readline())
                return int(answers.readline())
            except TimeoutError:
                if pid is not None:  # else the server itself has not come so far
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
        _settle({1: out, 2: err}, environment, cwd)
        _become("trainer", words)
    asked.sendall(f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    asked.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _settle(files: Mapping[int, int], environment: Mapping[str, str], cwd: str) -> None:
    """Have these files, under the numbers given, and no others but the streams; this environment and folder."""
    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, ABOVE) for number, fd in files.items()}
    os.closerange(3, ABOVE)
    for number, fd in moved.items():
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = cwd
    importlib.reload(sys.modules["trainer.processes.faults"])  # which looks at the environment once
    _spares.clear()


def _become(module: str, words: list[str]) -> None:
    """Be `python -m module words...`; ends this process."""
    sys.argv = [module, *words]
    for _ in range(1 if "RANK" in os.environ else SPARES):
        _spares.append(_spare())
    subprocess.Popen._execute_child = _execute_child
    util.spawnv_passfds = _spawnv_passfds
    _run(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


def _spare() -> tuple[int, socket.socket]:
    """A child of this process that waits for a command, or for this process's end."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child:
        theirs.close()
        return child, ours
    ours.close()
    for _, other in _spares:
        other.close()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the group's, which a command would hear
        signal.signal(number, signal.SIG_IGN)
    data, fds, _, _ = socket.recv_fds(theirs, 1, 3)
    if not data:
        os._exit(0)
    job = json.loads(theirs.makefile().readline())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, job["mask"])
    if job["session"]:
        os.setsid()
    _settle(dict(zip(job["numbers"], fds, strict=True)), job["environment"], job["cwd"])
    if job["code"]:
        _run(lambda: exec(job["code"], {}))
    _become(job["module"], job["words"])
    raise AssertionError("never here")


def _wake(spare: socket.socket, files: Mapping[int, int], **job: object) -> None:
    """Give a waiting child its job and its files by number, and this thread's mask of signals, as `exec` would."""
    asked = {"module": "", "words": [], "environment": {**os.environ}, "cwd": os.getcwd(), "session": False, "code": ""}
    mask = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    with spare:
        socket.send_fds(spare, [b"x"], [*files.values()])
        spare.sendall(json.dumps({**asked, **job, "numbers": [*files], "mask": mask}).encode() + b"\n")


def _execute_child(process: subprocess.Popen, *given, **named) -> None:
    """Start `python -m trainer...` in a spare child, while there is one, and anything else as `subprocess` does."""
    asked = inspect.signature(_execute).bind(process, *given, **named).arguments
    command = [word for word in map(str, asked["args"]) if word != "-u"]
    ours = command[:2] == [sys.executable, "-m"] and command[2].partition(".")[0] == "trainer"
    if not ours or not _spares or asked["pass_fds"]:
        _execute(process, *given, **named)
        return
    process.pid, spare = _spares.pop(0)
    process._child_created = True
    pipes = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    environment = os.environ if asked["env"] is None else asked["env"]
    files = {stream: fd if fd >= 0 else stream for stream, fd in enumerate(pipes)}
    session, cwd = asked["start_new_session"], asked["cwd"] or os.getcwd()
    _wake(spare, files, module=command[2], words=command[3:], environment={**environment}, cwd=cwd, session=session)
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(asked[name] for name in ends))


def _spawnv_passfds(path: str, args: list[str], passfds: list[int]) -> int:
    """Start multiprocessing's fork server in a spare child, while there is one; anything else as it does."""
    if "multiprocessing.forkserver" not in args[-1] or not _spares:
        return _spawn(path, args, passfds)
    child, spare = _spares.pop(0)
    _wake(spare, {fd: fd for fd in passfds}, code=args[-1])
    return child


def _run(work: Callable[[], object]) -> None:
    """As the interpreter does: the work, its exit code, and what is to be done at exit."""
    import atexit
    import traceback

    code = 0
    try:
        work()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

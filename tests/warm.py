"""Processes that have imported torch already: `Popen` and `run` are subprocess's, but for the seconds of that import.

A nursery is a process that has imported what our commands import, and waits. Asked for a command, it forks twice and
lets the first child die: the second is adopted by the process that asked, whose child it would have been, runs the
same module or program as Python would, with words, environment, folder and files of its own, and ends as the
interpreter ends. It forks before any thread of OpenMP or gloo exists. Each command begins with a nursery for what it
starts itself: the ranks of a launcher, fork servers, probes.

To the kernel such a process has its nursery's command line: what is to be found by that, or what Python does before the
first import, takes a process of subprocess's own.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import importlib
import inspect
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import util
from pathlib import Path
from typing import NoReturn

PRELOADED = ["torch.distributed.run", "torch.utils.tensorboard", "sklearn.datasets"]  # beside all of trainer
DEAF = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # in a nursery, for its whole group hears them
ABOVE = 900  # no process here has as many files
NURSERY = "nursery"  # its name in /proc
ROOM = 30_000  # bytes for the environments of all that is forked
ADOPTING = 36  # PR_SET_CHILD_SUBREAPER
_execute = subprocess.Popen._execute_child
_spawn = util.spawnv_passfds
_asking = threading.Lock()
_libc = ctypes.CDLL(None, use_errno=True)
_nursery: socket.socket | None = None  # the line to this process's


class Popen(subprocess.Popen):
    """As subprocess's, for `[sys.executable, ...]`; what cannot be warm is started as ever."""

    def _execute_child(self, *given, **named) -> None:
        _execute_child(self, *given, **named)


def run(command: Sequence[str], *, input=None, timeout=None, capture_output=False, check=False, **options):
    """As subprocess's."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def without_nursery(pids: Iterable[str]) -> list[str]:
    """Process ids but for nurseries, which a command of subprocess's own has none of."""
    return [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() != NURSERY]


def _start_nursery() -> None:
    """A test process's, which has to import torch; gone with that process."""
    global _nursery
    from tests.commands import environment

    _nursery, theirs = socket.socketpair()
    script = f"from tests.warm import serve; serve({theirs.fileno()})"
    command = [sys.executable, "-c", script]
    first = environment(TMPDIR=tempfile.gettempdir(), ROOM=" " * ROOM)  # for every test; what is imported writes there
    subprocess.Popen(command, pass_fds=[theirs.fileno()], env=first, stdin=subprocess.DEVNULL)
    theirs.close()


def serve(number: int) -> None:
    """Be the nursery of the process at the other end."""
    import gc

    import trainer

    for name in [*PRELOADED, *(module.name for module in pkgutil.walk_packages(trainer.__path__, "trainer."))]:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    _think_less()
    gc.collect()
    gc.freeze()  # else each process would soon look at all of that, and so make it its own
    _nurse(socket.socket(fileno=number))


def _think_less() -> None:
    """torch's launcher looks at each frame's source, a second in all, for a name that it writes into no log of ours."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


# ------------------------------------------------------------------------------------------------------- who is asked


def _nurse(wire: socket.socket) -> None:
    """Fork what is asked for, until the other side is gone; returns in a process that is done with its command."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    _name(NURSERY)
    for number in DEAF:
        signal.signal(number, signal.SIG_IGN)
    try:
        while (asked := _next(wire)) is not None:
            between = os.fork()
            if between == 0:
                child = os.fork()
                if child == 0:
                    break
                wire.sendall(str(child).encode())
                os._exit(0)
            os.waitpid(between, 0)
            wire.sendall(b"\n")
            for fd in asked[1]:
                os.close(fd)
    except (OSError, ValueError):  # who asked is gone
        os._exit(1)
    if asked is None:
        os._exit(0)
    wire.detach()  # when it goes, its number may be another file's
    _become(*asked)


def _next(wire: socket.socket) -> tuple[dict, list[int]] | None:
    """What is asked for, and its files; None when nobody is there to ask."""
    data, fds, _, _ = socket.recv_fds(wire, 1, 16)
    return (json.loads(wire.makefile().readline()), fds) if data else None


def _become(job: Mapping, fds: Sequence[int]) -> None:
    """Be the command that is asked for."""
    _name("python")
    signal.pthread_sigmask(signal.SIG_SETMASK, job["mask"])
    for number in DEAF:
        heard = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in job["ignored"] else heard)
    late = time.monotonic() + 20
    while os.getppid() != job["parent"]:
        if time.monotonic() > late:
            os._exit(1)  # it died meanwhile
        time.sleep(0.001)
    if job["session"]:
        os.setsid()
    _settle(dict(zip(job["numbers"], fds, strict=True)), job["environment"], job["cwd"])
    kind, what, words = job["command"]
    sys.argv = [what if kind == "file" else kind, *words]
    sys.path[0] = {"-m": job["cwd"], "file": os.path.dirname(os.path.abspath(what))}.get(kind, "")
    if not job["serves"]:
        _have_nursery()
    if job["serves"] or kind == "-m":
        _leave_after(lambda: _execute_python(kind, what))
    _execute_python(kind, what)


def _execute_python(kind: str, what: str) -> None:
    if kind == "-m":
        if not hasattr(sys.modules.get(what), "__path__"):
            sys.modules.pop(what, None)  # a module that is known already is warned of
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    name, source = {"-c": ("<string>", what), "-": ("<stdin>", None)}.get(kind, (what, None))
    if source is None:
        source = sys.stdin.read() if kind == "-" else Path(what).read_bytes()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "file":
        main.__file__ = what
    exec(compile(source, name, "exec"), main.__dict__)


def _leave_after(work: Callable[[], None]) -> NoReturn:
    """As the interpreter does, but for taking all modules apart, which takes half a second."""
    code = 0
    try:
        work()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    with suppress(ValueError):  # it may have closed them
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _name(name: str) -> None:
    """What /proc calls this process."""
    _libc.prctl(15, name.encode(), 0, 0, 0)


def _settle(files: Mapping[int, int], environment: Mapping[str, str], cwd: str) -> None:
    """Have these files, under the numbers given, and no others but the streams; this environment and folder."""
    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, ABOVE) for number, fd in files.items()}
    os.closerange(3, ABOVE)
    for number, fd in moved.items():
        os.dup2(fd, number)
        os.close(fd)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        errors = "backslashreplace" if name == "stderr" else None
        stream = open(number, "w" if number else "r", 1, errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(cwd)
    ours, theirs = ([*filter(None, at.get("PYTHONPATH", "").split(os.pathsep))] for at in (os.environ, environment))
    if ours != theirs:
        sys.path[1:] = [*theirs, *(path for path in sys.path[1:] if path not in ours)]
    os.environ.clear()
    os.environ.update(environment)
    _tell_kernel(environment)
    tempfile.tempdir = None  # which is a variable's too
    importlib.reload(sys.modules["trainer.processes.faults"])  # which looks at the environment once


def _tell_kernel(environment: Mapping[str, str]) -> None:
    """What /proc tells of this process's environment is in its own memory, where it began."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    block = b"".join(os.fsencode(f"{name}={value}\0") for name, value in environment.items())[: end - begin]
    ctypes.memmove(begin, block.ljust(end - begin, b"\0"), end - begin)


def _have_nursery() -> None:
    """A nursery for what this process starts, forked while nothing has happened in it."""
    global _nursery
    _nursery, theirs = socket.socketpair()
    if os.fork() == 0:
        _nursery.close()
        _nurse(theirs)
        raise SystemExit  # as one that was forked there, whose command is done
    theirs.close()
    subprocess.Popen._execute_child = _execute_child
    util.spawnv_passfds = spawnv_passfds


# ------------------------------------------------------------------------------------------------------------ who asks


def _ask(command: tuple[str, str, list[str]], files: Mapping[int, int], **job: object) -> int:
    """Have a command forked as a child of this process, with its files by number, and what `exec` would leave it."""
    mask = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    ignored = [number for number in DEAF if signal.getsignal(number) is signal.SIG_IGN]
    asked = {"command": command, "numbers": [*files], "parent": os.getpid(), "mask": mask, "ignored": ignored}
    asked |= {"environment": {**os.environ}, "cwd": os.getcwd(), "session": False, "serves": False}
    with _asking, _adopting():
        if _nursery is None:
            _start_nursery()
        socket.send_fds(_nursery, [b"x"], [*files.values()])
        _nursery.sendall(json.dumps({**asked, **job}).encode() + b"\n")
        answer = _nursery.makefile().readline()
    if not answer:
        raise RuntimeError("the nursery is gone: `python -c 'from tests.warm import serve'` may say why")
    return int(answer)


@contextmanager
def _adopting():
    """Within, what a process below this one leaves behind becomes a child of this one."""
    _libc.prctl(ADOPTING, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(ADOPTING, 0, 0, 0, 0)


def _warm(words: Sequence[str]) -> tuple[str, str, list[str]] | None:
    """What Python is to run, with its words; None where it is to be a new process."""
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
    """Have Python's commands forked, and start anything else as `subprocess` does."""
    asked = inspect.signature(_execute).bind(process, *given, **named).arguments
    args = asked["args"]
    command = None if isinstance(args, str) else _warm([*map(os.fsdecode, args)])
    if command is None or asked["pass_fds"] or asked["preexec_fn"]:
        _execute(process, *given, **named)
        return
    pipes = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    environment = os.environ if asked["env"] is None else asked["env"]
    files = {stream: fd if fd >= 0 else stream for stream, fd in enumerate(pipes)}
    process.pid = _ask(
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
    return _ask(command, {fd: fd for fd in (0, 1, 2, *passfds)}, serves=True)

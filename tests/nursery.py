"""The process that `tests.warm` asks: it has imported what our commands import, and forks each
command from there.

Asked for a command, it forks a child of its own parent, the process that asked. That runs the same
module or program as Python would, with words, environment, folder and files of its own, and ends as
the interpreter ends. It forks before any thread of OpenMP or gloo exists. Each command begins with
a nursery for what it starts itself: the ranks of a launcher, fork servers, probes.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import os
import pkgutil
import platform
import re
import runpy
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import PIL

from tests import warm

# Modules to import in addition to all of trainer.
PRELOADED = [
    "torch.distributed.run",
    "torch.utils.tensorboard",
    "sklearn.datasets",
]
PRELOADED += ["matplotlib.backends.backend_agg", "torch.distributed.pipelining"]
PRELOADED += ["pillow_heif", *(f"PIL.{name}" for name in PIL._plugins)]
ABOVE = 900  # no process here has as many files
COLLAPSE = 25  # MADV_COLLAPSE
MAIN = "trainer.__main__"  # The server of ranks has imported this module.
_libc = ctypes.CDLL(None, use_errno=True)


def serve(number: int) -> None:
    """Be the nursery of the process at the other end."""
    import trainer

    for name in [
        *PRELOADED,
        *(module.name for module in pkgutil.walk_packages(trainer.__path__, "trainer.")),
    ]:
        if not name.endswith("__main__"):
            with suppress(ModuleNotFoundError):  # pillow_heif need not be here
                importlib.import_module(name)
    _think_less()
    for finalizer in weakref.finalize._registry:
        # torch takes its operators apart: in a fork, which copies what it touches, in 60 ms
        finalizer.atexit = False
    gc.collect()
    gc.freeze()  # else each process would soon look at all of that, and so make it its own
    _have_large_pages()
    _nurse(socket.socket(fileno=number))


def _think_less() -> None:
    """torch's launcher looks at each frame's source, a second in all, for a name that it writes
    into no log of ours.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def _have_large_pages() -> None:
    """Fewer for each fork to copy, which else takes three times as long; a kernel that knows none
    changes nothing.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *_, name = [*line.split(maxsplit=5), ""][:6]
        if rights == "rw-p" and name in ("", "[heap]"):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), COLLAPSE)


def _nurse(wire: socket.socket) -> None:
    """Fork what is asked for, until the other side is gone; returns in a process that is done with
    its command.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    _name(warm.NURSERY)
    for number in warm.DEAF:
        signal.signal(number, signal.SIG_IGN)
    try:
        while (asked := warm.received(wire)) is not None:
            begun, begins = os.pipe()
            child = _fork_for_parent()
            if child == 0:
                if asked[0]["session"]:
                    os.setsid()
                os.close(begins)
                os.close(begun)
                break
            os.close(begins)
            os.read(begun, 1)
            wire.sendall(f"{child}\n".encode())
            for fd in (begun, *asked[1]):
                os.close(fd)
    except (OSError, ValueError):  # The process that asked has ended.
        os._exit(1)
    if asked is None:
        os._exit(0)
    wire.detach()  # when it goes, its number may be another file's
    _become(*asked)


def _fork_for_parent() -> int:
    """Fork like `os.fork`, but as a child of our parent, and without the fork handlers of
    threads.
    """
    own = ctypes.c_ulong()
    # PR_GET_TID_ADDRESS: where C keeps the number of its thread.
    _libc.prctl(40, ctypes.byref(own), 0, 0, 0)
    number, places = (
        (56, (0, own.value, 0)) if platform.machine() == "x86_64" else (220, (0, 0, own.value))
    )
    # CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID.
    flags = 0x8000 | 0x200000 | 0x1000000 | signal.SIGCHLD
    ctypes.pythonapi.PyOS_BeforeFork()
    child = ctypes.pythonapi.syscall(*map(ctypes.c_long, (number, flags, 0, *places)))
    (ctypes.pythonapi.PyOS_AfterFork_Parent if child else ctypes.pythonapi.PyOS_AfterFork_Child)()
    if child < 0:
        raise OSError("no process can be forked")
    return child


def _become(job: Mapping, fds: Sequence[int]) -> None:
    """Be the command that is asked for."""
    _name("python")
    signal.pthread_sigmask(signal.SIG_SETMASK, job["mask"])
    for number in warm.DEAF:
        heard = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in job["ignored"] else heard)
    if os.getppid() != job["parent"]:
        os._exit(1)  # The child has died.
    _settle(
        dict(zip(job["numbers"], fds, strict=True)),
        job["environment"],
        job["cwd"],
    )
    kind, what, words = job["command"]
    sys.argv = [what if kind == "file" else kind, *words]
    sys.path[0] = {"-m": job["cwd"], "file": os.path.dirname(os.path.abspath(what))}.get(kind, "")
    if not job["serves"]:
        _have_nursery()
    elif MAIN in what:
        _have_nursery_in_ranks()
    if any(
        (Path(folder) / "sitecustomize.py").exists()
        for folder in os.environ.get("PYTHONPATH", "").split(":")
    ):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")  # Python imports this module first.
    if job["serves"] or kind != "file":
        _leave_after(lambda: _execute_python(kind, what))
    # Else the interpreter cannot take apart what nanobind then says is leaked.
    atexit.register(gc.unfreeze)
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
    """Leave like the interpreter, but without deleting all modules, which takes half a second."""
    code = 0
    interrupted = False
    try:
        work()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if code and not isinstance(ending.code, int):
            print(ending.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        code = 1
        interrupted = isinstance(error, KeyboardInterrupt)
    threading._shutdown()
    atexit._run_exitfuncs()
    with suppress(ValueError):  # The program may have closed them.
        sys.stdout.flush()
        sys.stderr.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _name(name: str) -> None:
    """Set the name of this process in /proc."""
    _libc.prctl(15, name.encode(), 0, 0, 0)


def _settle(
    files: Mapping[int, int],
    environment: Mapping[str, str],
    cwd: str,
) -> None:
    """Have these files, under the numbers given, and no others but the streams; this environment
    and folder.
    """
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
    ours, reference = (
        [*filter(None, at.get("PYTHONPATH", "").split(os.pathsep))]
        for at in (os.environ, environment)
    )
    if ours != reference:
        sys.path[1:] = [*reference, *(path for path in sys.path[1:] if path not in ours)]
    os.environ.clear()
    os.environ.update(environment)
    _tell_kernel(environment)
    tempfile.tempdir = None  # The folder depends on a variable.
    # The module reads the environment once.
    importlib.reload(sys.modules["trainer.processes.faults"])


def _tell_kernel(environment: Mapping[str, str]) -> None:
    """Change the environment that /proc shows; it is read from the memory in which the process had
    it first.
    """
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    block = b"".join(os.fsencode(f"{name}={value}\0") for name, value in environment.items())[
        : end - begin
    ]
    ctypes.memmove(begin, block.ljust(end - begin, b"\0"), end - begin)


def _have_nursery() -> None:
    """A nursery for what this process starts, forked while nothing has happened in it."""
    ours, reference = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _nurse(reference)
        raise SystemExit  # The process ends like one that was forked there.
    reference.close()
    warm.ask(ours)
    warm.start_all_warm()


def _have_nursery_in_ranks() -> None:
    """A nursery for each rank that is forked here and may start a server of its own, for workers
    that read files.
    """
    module = importlib.import_module(MAIN)
    main = module.main

    def main_of_rank() -> None:
        if any(re.match(r"data\.(root=|workers=[1-9])", word) for word in sys.argv[1:]):
            _have_nursery()
        main()

    module.main = main_of_rank

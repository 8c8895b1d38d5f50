"""Processes do not hang: no code forks by itself, because OpenMP waits for missing threads
afterwards; and processes die together.
"""

import ast
import errno
import os
import signal
import subprocess
import sys
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

import trainer
from tests.command_line import PROJECT, environment, within
from trainer.processes import fork_server

# --- the syntax trees
# ---------------------------------------------------------------------------------------------

# Functions of multiprocessing that do not start processes by the global start method.
HARMLESS = {"active_children", "cpu_count", "current_process", "get_context", "parent_process"}
HARMLESS |= {"connection", "forkserver", "process", "resource_tracker", "shared_memory", "spawn"}
HARMLESS |= {"context", "reduction", "util"}
FORKS = {"os.fork", "os.forkpty", "pty.fork"}
CONTEXT = {"ProcessPoolExecutor": "mp_context", "DataLoader": "multiprocessing_context"}


def offences(source):
    """The lines of a module that fork, change the global start method, or depend on it."""
    tree = ast.parse(source)
    homes, actual = {}, set()  # local name -> what it is in full
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            homes |= {n.asname: n.name for n in node.names if n.asname}
        elif isinstance(node, ast.ImportFrom):
            names = {n.asname or n.name: f"{node.module}.{n.name}" for n in node.names}
            homes |= names
            actual |= {node.lineno for name in names.values() if forbidden(name)}

    def full(node):
        head, _, rest = ast.unparse(node).partition(".")
        return f"{homes.get(head, head)}.{rest}".rstrip(".")

    for node in ast.walk(tree):
        named = isinstance(node, ast.Attribute | ast.Name) and forbidden(full(node))
        if named or (
            isinstance(node, ast.Call) and not well_called(full(node.func).rpartition(".")[2], node)
        ):
            actual.add(node.lineno)
    return sorted(actual)


def forbidden(name):
    parts = name.removeprefix("torch.").split(".")
    used = parts[1:2] if parts[0] == "multiprocessing" else []
    return name in FORKS or parts[-1] == "set_start_method" or not HARMLESS.issuperset(used)


def well_called(name, call):
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name == "get_context":
        arguments = [*call.args, *keywords.values()]
        return [getattr(value, "value", None) for value in arguments] in (["spawn"], ["forkserver"])
    if name == "DataLoader" and None not in keywords:
        workers = keywords.get("num_workers", ast.Constant(0))
        if isinstance(workers, ast.Constant) and workers.value == 0:
            return True
    return name not in CONTEXT or CONTEXT[name] in keywords


@pytest.mark.parametrize(
    "path", sorted(Path(trainer.__file__).parent.rglob("*.py")), ids=lambda p: p.stem
)
def test_no_code_forks_or_depends_on_the_global_start_method(path):
    assert offences(path.read_text()) == []


FOUND = [
    "import os; os.fork()",
    "from os import fork",
    "import multiprocessing; multiprocessing.set_start_method('spawn')",
    "import multiprocessing as mp; mp.Process()",
    "import torch.multiprocessing as mp; mp.Queue()",
    "from torch import multiprocessing as mp; mp.Pool()",
    "from multiprocessing import Process",
    "import multiprocessing; multiprocessing.get_context()",
    "import multiprocessing; multiprocessing.get_context('fork')",
    "from multiprocessing import get_context; get_context(chosen)",
    "from concurrent.futures import ProcessPoolExecutor; ProcessPoolExecutor(4)",
    "from torch.utils.data import DataLoader; DataLoader(data, num_workers=4)",
    "import torch; torch.utils.data.DataLoader(data, **options)",
]
ALLOWED = [
    "import multiprocessing; context = multiprocessing.get_context('spawn'); context.Process(); "
    "context.Queue()",
    "import multiprocessing; multiprocessing.active_children()",
    "from multiprocessing import connection, shared_memory; connection.wait([])",
    "from concurrent.futures import ProcessPoolExecutor; ProcessPoolExecutor(4, "
    "mp_context=context)",
    "from torch.utils.data import DataLoader; DataLoader(data); DataLoader(data, num_workers=0)",
    "from torch.utils.data import DataLoader; DataLoader(data, num_workers=4, "
    "multiprocessing_context=context)",
]


@pytest.mark.parametrize("line", [*FOUND, *ALLOWED])
def test_such_code_is_detected(line):
    assert offences(line) == [1] * (line in FOUND)


# --- processes that end
# -------------------------------------------------------------------------------------------


def members(session):
    """The living processes of a session."""
    collected = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, _, _, its_session = (
                Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
            )
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            collected.append(int(pid))
    return collected


STARTING = """
import sys
from trainer.processes import fork_server
fork_server.start_server("takes_long")
print("server", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_fork_server_that_still_imports_dies_with_its_process(tmp_path):
    (tmp_path / "takes_long.py").write_text(
        "import time; print('importing', flush=True); time.sleep(60)"
    )
    main = subprocess.Popen(
        [sys.executable, "-c", STARTING],
        env=environment(PYTHONPATH=f"{tmp_path}:{PROJECT}"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert {main.stdout.readline(), main.stdout.readline()} == {"server\n", "importing\n"}
        main.kill()
        main.wait()
        assert within(5, lambda: not members(main.pid))
    finally:
        for pid in members(main.pid):
            os.kill(pid, signal.SIGKILL)


def test_a_server_that_cannot_start_leaves_no_signal_blocked(monkeypatch):
    """Processes that are started later would inherit the blocked signals."""

    def fail():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(resource_tracker, "ensure_running", fail)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with pytest.raises(BlockingIOError):
            fork_server.start_server()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

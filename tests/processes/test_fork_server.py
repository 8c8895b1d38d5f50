"""The fork server that a rank of our launcher forks before it has threads; tests/data holds what workers do with it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests import warm
from tests.command_line import PROJECT, alive, environment

RANK = """
import json, multiprocessing, os, signal, sys, threading, time
from multiprocessing import util
from trainer.processes import early, fork_server

def worker(line):
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    fork_server.begin_worker()
    line.send({
        "server": os.getppid(),
        "blocked": fork_server.SIGNALS <= kept,
        "torch": "torch" in sys.modules,
        "added": os.environ.get("ADDED"),
        "removed": os.environ.get("REMOVED"),
        "ours": [name for name in (fork_server.SAFE, fork_server.SERVED) if name in os.environ],
        "cores": sorted(os.sched_getaffinity(0)),
        "files": len(os.listdir("/proc/self/fd")),
        "forked": forked(),
    })
    time.sleep(1000)

def forked():
    child = os.fork()
    if child == 0:
        time.sleep(0.2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def rank(line, case):
    if case == "threads":
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    early.install_handlers()
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    fork_server.begin_rank()
    children = spares()
    os.environ["ADDED"] = "later"
    del os.environ["REMOVED"]
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    start, cold = util.spawnv_passfds, []
    util.spawnv_passfds = lambda path, words, fds: cold.append(words) or start(path, words, fds)
    if case in ("killed", "stopped"):
        fork_server.ANSWER = 0.5
        os.kill(children[0], signal.SIGKILL if case == "killed" else signal.SIGSTOP)
        time.sleep(0.2)
    def begin():
        ours, theirs = multiprocessing.Pipe()
        process = fork_server.context("torch").Process(target=worker, args=(theirs,), daemon=True)
        fork_server.start(process)
        return ours.recv() | {"pid": process.pid}
    seen = [begin(), begin()]
    if case == "killed later":
        os.kill(seen[0]["server"], signal.SIGKILL)
        time.sleep(0.5)
        seen.append(begin())
    line.send((children, len(cold), seen, forked(), os.getpid(), spares()))
    time.sleep(1000)

def spares():
    own = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    return [int(pid) for pid in open(own).read().split()]

if __name__ == "__main__":
    os.environ["REMOVED"] = "before"
    ours, theirs = multiprocessing.Pipe()
    context = fork_server.context("torch")
    context.Process(target=rank, args=(theirs, sys.argv[1])).start()
    print(json.dumps(ours.recv()), flush=True)
    sys.stdin.read()
    os._exit(0)
"""


@pytest.fixture
def job(request, tmp_path):
    """What a rank and its workers see, and the process that started it."""
    (tmp_path / "script.py").write_text(RANK)
    process = warm.Popen(
        [sys.executable, str(tmp_path / "script.py"), request.param],
        env=environment(PYTHONPATH=str(PROJECT)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield json.loads(process.stdout.readline()), process
        process.stdin.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "cold"),
    [
        ("", 0),
        ("killed", 1),
        *(pytest.param(case, 1, marks=pytest.mark.full) for case in ("stopped", "killed later", "threads")),
    ],
    indirect=["job"],
)
def test_workers_of_a_rank_are_forked_from_what_it_forked_itself(job, cold):
    """With its variables and cores of now and no file of its own; a server starts cold where none answers."""
    (children, started, seen, code, rank, now), process = job
    assert started == cold and len(children) == (process.args[-1] != "threads")
    if process.args[-1] == "":
        assert {worker["server"] for worker in seen} == set(children)
    else:
        assert len(now) == 1 and now != children, "what did not serve is gone, and no zombie"
    for worker in seen:
        facts = {key: worker[key] for key in ("blocked", "torch", "added", "removed", "ours", "forked")}
        assert facts == {
            "blocked": True, "torch": True, "added": "later", "removed": None, "ours": [], "forked": 0
        }  # fmt: skip
        assert worker["cores"] == [max(os.sched_getaffinity(0))]
        assert worker["files"] < 20
    assert code == 0  # what a rank forks itself may live
    os.kill(rank, signal.SIGKILL)
    ended = {worker["pid"] for worker in seen} | {worker["server"] for worker in seen}
    deadline = time.monotonic() + 5
    while (left := {pid for pid in ended if alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == set()

"""Signals in small child processes that import no torch."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.command_line import PROJECT, environment, python
from trainer.errors import Preempted
from trainer.processes import early, family
from trainer.processes.interrupts import Interrupts, stop_between_runs
from trainer.processes.terminal import outlive_terminal

PROGRAM = """
import signal, sys, time
from trainer.processes import early
from trainer.processes.interrupts import Interrupts
with Interrupts(True, {grace}) as interrupts:
    interrupts.beat()
    print("ready", flush=True)
    {body}
"""
WAITING = """
    for _ in range(200):
        time.sleep(0.02)
        interrupts.beat()
        if interrupts.received:
            time.sleep({linger})
            sys.exit(40 + interrupts.received)
"""
# Python runs no signal handler during a long C call, such as a collective that waits for a dead
# rank.
BLOCKED = """
    import ctypes
    while True:
        ctypes.CDLL(None).usleep(60_000_000)
"""
# Children that end, watched with a handler like DataLoader's, and then a step that takes long.
CHILDREN = """
    import subprocess
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for _ in range(3):
        subprocess.run(["true"])
    time.sleep(2)
    sys.exit(3)
"""


def start(body, grace=60, under=()):
    command = [
        *under,
        sys.executable,
        "-c",
        PROGRAM.format(grace=grace, body=body.strip()),
    ]
    none = subprocess.DEVNULL
    pipe = subprocess.PIPE
    child = subprocess.Popen(
        command,
        cwd=PROJECT,
        stdin=none,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )
    assert child.stdout.readline() == "ready\n", child.communicate()[1]
    return child


def end(child, timeout=20):
    try:
        _, errors = child.communicate(timeout=timeout)
        return child.returncode, errors
    finally:
        child.kill()
        child.wait()


@pytest.mark.slow(cases=["2-2-0.3-42", "15-15-1.2-55", "2-15-1.2-42"])
@pytest.mark.parametrize(
    ("first", "second", "seconds", "code"),
    [
        *(
            (number, None, 0, 40 + number)
            for number in (signal.SIGINT, signal.SIGTERM, *early.SAVE_AND_GO)
        ),
        (signal.SIGINT, signal.SIGINT, 0.3, 40 + signal.SIGINT),  # a copy
        (signal.SIGINT, signal.SIGINT, 1.2, 130),
        (signal.SIGINT, signal.SIGTERM, 1.2, 40 + signal.SIGINT),
        pytest.param(
            signal.SIGTERM, signal.SIGINT, 1.2, 40 + signal.SIGTERM, marks=pytest.mark.slow
        ),
        (signal.SIGTERM, signal.SIGTERM, 1.2, 40 + signal.SIGTERM),
    ],
)
def test_a_signal_raises_a_flag_and_a_second_may_end_it(first, second, seconds, code):
    child = start(WAITING.format(linger=seconds + 2 if second else 0))
    child.send_signal(first)
    if second:
        time.sleep(seconds)
        child.send_signal(second)
    actual, errors = end(child)
    assert actual == code and (second or errors == ""), errors


@pytest.mark.parametrize(
    ("routes", "arrivals", "new"),
    [
        (1, [0, 0.4, 0.8, 1.2, 1.4], [0, 1.2]),  # a person who hits the keys again and again
        (1, [0, 1.2, 1.3], [0, 1.2]),
        (2, [0, 5], [0]),  # the launcher is late
        (2, [0, 0.1, 1.2], [0, 1.2]),
    ],
)
def test_a_second_ctrl_c_is_distinguished_from_copies(monkeypatch, routes, arrivals, new):
    ctrl_c = early.CtrlC({signal.SIGINT: routes})
    collected = []
    for arrival in arrivals:
        monkeypatch.setattr(early.time, "monotonic", lambda now=arrival: 100.0 + now)
        if ctrl_c.is_new():
            collected.append(arrival)
    assert collected == new


def test_the_watcher_leaves_when_the_loop_cannot_come(tmp_path):
    """The stacks are in the run folder."""
    child = start(
        f"from trainer.processes import stacks\n    stacks.write_to({str(tmp_path)!r})\n    "
        f"{BLOCKED}",
        grace=2,
    )
    begun = time.monotonic()
    child.send_signal(signal.SIGTERM)
    code, errors = end(child)
    file = tmp_path / "stacks-rank0.txt"
    assert code == 143 and errors.count("\n") == 1 and errors.endswith(f" {file}\n")
    assert "2 s after SIGTERM" in file.read_text() and "Thread" in file.read_text()
    assert time.monotonic() - begun < 20


def test_a_step_is_not_waited_for_where_nothing_was_trained():
    """No step was trained since the last checkpoint: kernels may be compiled for minutes, and
    leaving loses nothing.
    """
    child = start(f"interrupts.nothing_new = lambda: True\n    {BLOCKED}", grace=1000)
    child.send_signal(signal.SIGTERM)
    code, errors = end(child)
    assert code == 143
    assert re.fullmatch(r"trainer: .*SIGTERM .*\bnothing new\b.*\n", errors), errors


def test_children_that_end_are_no_reason_to_leave():
    assert end(start(CHILDREN, grace=0.5)) == (3, "")


def test_under_nohup_a_terminal_that_closes_is_nothing():
    child = start("time.sleep(1)\n    sys.exit(3)", under=["nohup"])
    child.send_signal(signal.SIGHUP)
    assert end(child)[0] == 3


def test_a_users_own_handler_is_left_alone():
    before = signal.signal(signal.SIGUSR1, own := lambda *_: None)
    try:
        with Interrupts(False, 60.0):
            assert signal.getsignal(signal.SIGUSR1) is own
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def handlers():
    """Put all handlers back that a test changes."""
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, *early.SAVE_AND_GO)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_command_ends_though_a_signal_comes_where_exceptions_are_caught(handlers, number):
    """Reading an image that may be damaged swallows exceptions."""
    for each in (signal.SIGTERM, *early.SAVE_AND_GO):
        signal.signal(each, signal.SIG_DFL)
    with pytest.raises(Preempted, match=number.name), stop_between_runs("type it again"):
        try:
            signal.raise_signal(number)
        except Exception:
            signal.raise_signal(number)


class Dies:
    """An object whose finalizer is a callback: an exception there is lost."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        signal.raise_signal(self.number)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_in_a_program_counts_though_a_callback_swallows_it(handlers, number):
    with Interrupts(False, 60.0) as interrupts:
        Dies(number)
        assert interrupts.received == number


def test_a_rank_that_hangs_as_it_leaves_ends():
    """Signals are ignored at that time, including the one that the kernel sends when a torchrun
    dies.
    """
    program = (
        "import os, signal, time\nfrom trainer.processes.interrupts import Interrupts\n"
        "with Interrupts(True, 60.0) as interrupts:\n    interrupts.beat()\n    "
        "os.kill(os.getpid(), signal.SIGTERM)\n    while not interrupts.received:\n        pass\n"
        "    os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT'] = '1'\ntime.sleep(10)\n"
    )
    variables = {"RANK": "0", "WORLD_SIZE": "1"}
    begun = time.monotonic()
    assert python("-c", program, env=environment(**variables)).returncode == -signal.SIGALRM
    assert time.monotonic() - begun < 8


def test_a_step_or_save_too_slow_for_the_launcher_is_reported_once(monkeypatch):
    assert Interrupts(True, 40).too_slow(30, 20) == "" != Interrupts(True, 40).too_slow(30, 21)
    assert re.search(
        r"\b50 s\b.*\b110 s\b.*\b70 s\b.*type grace=80$", Interrupts(True, 40).too_slow(10, 50)
    )
    alone = Interrupts(True, 40)
    assert re.search(r"\b50 s\b.*\b40 s\b.*type grace=100$", alone.too_slow(50))
    assert alone.too_slow(50) == ""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert Interrupts(True, 40).grace == 25, "torchrun kills after 30"
    assert Interrupts(True, 40).too_slow(10, 10) == ""
    assert re.search(
        r"type grace=20 and set TORCH_ELASTIC_SHUTDOWN_TIMEOUT=50 ",
        Interrupts(True, 60.0).too_slow(10, 11),
    )
    assert re.search(
        r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=90 .*\b30 s\b", Interrupts(True, 60.0).too_slow(30)
    )
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "90")
    assert Interrupts(True, 40).grace == 40 and Interrupts(True, 100).grace == 85
    monkeypatch.setenv(family.PARENT, "1")
    assert re.search(r"type grace=140$", Interrupts(True, 60).too_slow(70)), "ours sets it"


# --- siblings
# --------------------------------------------------------------------------------------------------

# The children have one parent, like the ranks of a torchrun.
LAUNCHER = """
import os, signal, subprocess, sys, time
look = "from trainer.processes import family; print({look})"
def rank(number, program, **options):
    return subprocess.Popen([sys.executable, "-c", program],
        env={{**os.environ, "RANK": str(number)}}, **options)
sleeping = "import time; print('here', flush=True); time.sleep(60)"
others = [rank(number, sleeping, stdout=subprocess.PIPE) for number in (1, 2, 3)]
for other in others:
    other.stdout.readline()
time.sleep(0.2)
others[0].send_signal(signal.SIGSTOP)
others[1].kill()
os.waitid(os.P_PID, others[1].pid, os.WEXITED | os.WNOWAIT)  # a zombie
subprocess.run(["true"], env={{**os.environ, "RANK": "9"}})
rank(0, look).wait()
for other in others:
    other.kill()
"""


@pytest.mark.parametrize(
    ("look", "seen"),
    [
        (
            "{rank: state for rank, (_, state) in sorted(family.living_ranks().items())}",
            "{0: 'R', 1: 'T', 3: 'S'}",
        ),
        (
            "family.resume_stopped(), __import__('time').sleep(0.2), family.living_ranks()[1][1]",
            "[1] None S",
        ),
    ],
)
def test_ranks_see_their_siblings(look, seen):
    program = LAUNCHER.format(look=look)
    completed = python("-c", program)
    assert completed.stdout.splitlines()[-1] == seen, completed.stderr


def test_a_terminal_that_closes_fails_no_print(monkeypatch):
    """The launcher passes the signal to a rank a moment after its next line, which must not lose
    the step.
    """
    ours, reference = os.openpty()
    with open(reference, "w") as terminal, monkeypatch.context() as patched:
        kept = os.dup(1)
        os.dup2(reference, 1)
        try:
            patched.setattr(sys, "stdout", terminal)
            outlive_terminal()
            print("there", flush=True)
            assert os.read(ours, 100) == b"there\r\n"
            os.close(ours)
            print("gone", flush=True)
        finally:
            os.dup2(kept, 1)
            os.close(kept)


@pytest.mark.parametrize("ours", [True, False])
def test_a_rank_that_ends_behind_a_signal_is_not_waited_for(ours):
    """Our launcher has got the signal, too, and reads no result any more, but torch keeps a rank
    until its result is read.
    """
    program = (
        "import os, signal\n"
        "from trainer.processes.interrupts import Interrupts\n"
        "with Interrupts(True, 60.0) as interrupts:\n   "
        " interrupts.beat()\n    os.kill(os.getpid(), signal.SIGTERM)\n    while not "
        "interrupts.received:\n        pass\nprint('returns')\n"
    )
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        **({family.PARENT: str(os.getpid())} if ours else {}),
    }
    completed = python("-c", program, env=environment(**variables))
    assert (completed.returncode, completed.stdout) == ((143, "") if ours else (0, "returns\n")), (
        completed.stderr
    )


def test_handlers_are_put_back():
    program = (
        "import signal, threading\n"
        "from trainer.processes.interrupts import Interrupts\nbefore = "
        "signal.getsignal(signal.SIGTERM)\nwith Interrupts(True, 60.0):\n    assert "
        "signal.getsignal(signal.SIGTERM) != before\nprint(signal.getsignal(signal.SIGTERM) == "
        "before, threading.active_count())\n"
    )
    assert python("-c", program).stdout == "True 1\n"


LEAVING = """
import atexit, sys, threading, time
from trainer.processes import early
from trainer.processes.interrupts import exit_python
sys.modules["torch"] = sys
def late():
    time.sleep(0.3)
    print("a thread's word", flush=True)
class Kept:
    def __del__(self):
        print("taken apart")
kept = Kept()
print("said", end=" ")
atexit.register(print, "asked for")
if "thread" in sys.argv:
    threading.Thread(target=late).start()
exit_python(3)
"""


def test_leaving_says_all_and_takes_nothing_apart(tmp_path):
    """And waits for who watches."""
    (tmp_path / "leaving.py").write_text(LEAVING)
    for words, message in (
        ([], "said asked for\n"),
        (["thread"], "said a thread's word\nasked for\ntaken apart\n"),
    ):
        completed = python("leaving.py", *words, cwd=tmp_path)
        assert (completed.returncode, completed.stdout, completed.stderr) == (3, message, "")
    watched = python("-m", "cProfile", "leaving.py", cwd=tmp_path)
    assert "function calls" in watched.stdout, watched.stdout + watched.stderr

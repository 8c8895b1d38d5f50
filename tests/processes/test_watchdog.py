"""A rank whose Python code cannot run: small processes without torch, and whole runs under both
launchers.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from tests import warm
from tests.command_line import PROJECT, QUIET, environment, torchrun, within
from trainer.processes.watchdog_process import WATCHDOG_SIGNAL

BLOCKED = """
    import ctypes
    while True:
        ctypes.CDLL(None).usleep(60_000_000)
"""

TERM = int(signal.SIGTERM)
LINE = r".*\bPython\b.* \d+ s .*\bsignal\b"

# A C call that keeps the interpreter's lock, and which no signal interrupts: it waits for a locked
# mutex.
HOLD = """
import ctypes, os, signal, struct, time
def hold(seconds):
    mutex, until = ctypes.create_string_buffer(64), struct.pack("qq", int(time.time() + seconds), 0)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_timedlock(mutex, until)
"""
RANK = f"""{HOLD}
import sys
from trainer.processes.interrupts import Interrupts
signal.signal(signal.SIGCHLD, lambda *_: None)
with Interrupts(True, 60) as interrupts:
    interrupts.beat()
    beside = interrupts._watchdog._process.pid
    print(os.getpid(), beside, flush=True)
    BODY
sys.exit(40 + (interrupts.received or 0))
"""
# The children have one parent, like the ranks of a torchrun.
LAUNCHER = """
import ctypes, os, subprocess, sys, time
# PR_SET_CHILD_SUBREAPER: what a rank leaves behind comes here
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
def gone(pid):
    for _ in range(50):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if ") Z " in stat.read():
                    return True
        except OSError:
            return True
        time.sleep(0.1)
    return False
def rank(number, program):
    ours = {**os.environ, "RANK": str(number), "WORLD_SIZE": "2"}
    return subprocess.Popen([sys.executable, "-c", program], env=ours, stdout=subprocess.PIPE,
        text=True)
peer = rank(1, "import time; print(flush=True); time.sleep(60)")
peer.stdout.readline()
me = rank(0, sys.argv[1])
pids = me.stdout.readline().strip()
time.sleep(0.3)
begun = time.monotonic()
for action in sys.argv[2:]:
    if action == "peer":
        peer.kill()
        peer.wait()
    else:
        os.kill(me.pid, int(action))
try:
    print(me.wait(25), time.monotonic() - begun, gone(pids.split()[1]), flush=True)
finally:
    peer.kill()
    me.kill()
"""


def ranks(body, *actions):
    """Two of them: what rank 0 does, and what happens meanwhile to its `peer` (killed) or to itself
    (signals).
    """
    command = [
        sys.executable,
        "-c",
        LAUNCHER,
        RANK.replace("BODY", body),
        *map(str, actions),
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=PROJECT, env=environment(), stdout=pipe, stderr=pipe, text=True
    )


def end(process, most=25.0):
    """Return how rank 0 ended and its output, and wait for the other processes."""
    written, message = process.communicate(timeout=60)
    code, seconds, gone = written.split() or message
    assert gone == "True" and float(seconds) < most
    return int(code), message


@pytest.mark.slow
def test_a_stuck_rank_is_ended_once_a_peer_is_gone():
    """Whether it gets stuck before the signal or after it."""
    later = "while not interrupts.received:\n        time.sleep(0.01)\n    hold(1000)"
    for process in (ranks("hold(1000)", "peer", TERM), ranks(later, TERM, "peer")):
        code, message = end(process)
        assert code == -WATCHDOG_SIGNAL
        assert re.fullmatch(f"trainer: rank 0: {LINE}.*without saving\n", message)


@pytest.mark.slow
def test_a_rank_that_only_takes_long_is_left_alone():
    """No signal asks it to leave, all its peers are alive, and it is saving."""
    others = "for _ in range(9):\n        os.kill(os.getpid(), signal.SIGCHLD)\n    hold(8)"
    cases = {
        ranks("hold(8)", "peer"): 40,
        ranks(others, "peer"): 40,
        ranks("hold(8)", TERM): 40 + TERM,
        ranks("with interrupts.saving():\n        hold(8)", "peer", TERM): 40 + TERM,
    }
    assert [end(process) for process in cases] == [(code, "") for code in cases.values()]


SAVING = """
    from trainer.processes import silence
    silence.set_limit(1000.0)
    with interrupts.saving():
        wait = silence.begin_wait(None, print) if {waits} else None
        time.sleep(8)
    sys.exit(40)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "code"),
    [(BLOCKED, 143), (SAVING.format(waits=True), 143), (SAVING.format(waits=False), 40)],
    ids=["a step", "a save that waits for ranks", "a save that writes"],
)
def test_running_python_code_does_not_wait_for_a_call_blocked_by_a_lost_peer(body, code):
    """A collective may wait for minutes until its timeout, or for ever, after a peer was killed.

    A file is written meanwhile.
    """
    actual, message = end(ranks(body.strip(), "peer", TERM), most=10.0)
    assert actual == code and bool(re.search("rank 0: rank 1 .*SIGTERM", message)) == (
        code == 143
    ), message


FORKED = (
    # Python 3.12 and later warn about a fork beside other threads.
    "import warnings; warnings.simplefilter('ignore')\n    "
    "if os.fork() == 0:\n        os.closerange(1, 3)\n        "
    "time.sleep(20)\n        os._exit(0)\n    os._exit(3)"
)


@pytest.mark.parametrize(
    ("leaves", "code"),
    [("os._exit(3)", 3), ("raise SystemExit(3)", 3), ("os.kill(os.getpid(), 9)", -9), (FORKED, 3)],
    ids=["at once", "as Python does", "killed", "with a child that has its files"],
)
def test_helper_processes_of_a_rank_end_with_it(leaves, code):
    assert end(ranks(leaves)) == (code, "")


# --- whole runs
# --------------------------------------------------------------------------------------------------

OWN = f"""{HOLD}
from pathlib import Path
from torch import nn
import trainer

Path(f"rank{{os.environ.get('RANK', '')}}").write_text(str(os.getpid()))

class Net(nn.Linear):
    passes = 0
    def forward(self, inputs):
        self.passes += self.training
        if self.passes == 12 and os.environ["RANK"] == "1":
            Path("stuck").touch()
            hold(1000)
        return super().forward(inputs.flatten(1))

@trainer.register_model("own")
def own(num_classes, channels, image_size):
    return Net(channels * image_size**2, num_classes)
"""
WORDS = [
    "recipe=digits",
    "mode=ddp",
    "plugin=own",
    "model.name=own",
    "devices=[cpu]",
    "batch_size=32",
    *QUIET,
]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ours", "torchrun"])
def test_a_run_with_a_stuck_rank_ends(launcher, tmp_path):
    """The peer is killed, or its torchrun is signaled.

    It would kill the rank after 30 s, and ours after `grace` + 30.
    """
    (tmp_path / "own.py").write_text(OWN)
    words = [*WORDS, f"grace={60 if launcher == 'ours' else 6}"]
    ours = {"PYTHONPATH": f"{tmp_path}:{PROJECT}"}
    if launcher == "ours":
        command = [sys.executable, "-m", "trainer", *words, "nproc=2"]
        to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        context = warm.Popen(command, env=environment(**ours), cwd=tmp_path, **to)
    else:
        context = torchrun(
            *words, arguments=["--standalone", "--nproc_per_node=2"], env=ours, cwd=tmp_path
        )
    pids = []
    with context as process:
        try:
            assert within(90, lambda: (tmp_path / "stuck").exists() or process.poll() is not None)
            assert process.poll() is None, process.communicate()[0]
            pids = [int((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
            if launcher == "ours":
                os.kill(pids[0], signal.SIGKILL)
            else:
                process.send_signal(TERM)
            message = process.communicate(timeout=60)[0]
        finally:
            process.kill()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert re.search(f"^trainer: rank 1: {LINE}", message, re.MULTILINE), message
    assert process.returncode == (7 if launcher == "ours" else 1), message
    last = message.splitlines()[-1]
    assert launcher == "torchrun" or re.match("trainer: error: rank 0 .*SIGKILL", last), message

"""Signals in small child processes that import no torch."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent
PROGRAM = """
import signal, sys, time
from trainer.interrupts import Interrupts
with Interrupts() as interrupts:
    interrupts.beat({patience})
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
# In one long C call no handler runs, as in a collective that waits for the dead.
BLOCKED = """
    import ctypes
    while True:
        ctypes.CDLL(None).usleep(60_000_000)
"""


def start(body, patience=5):
    program = PROGRAM.format(patience=patience, body=body.strip())
    child = subprocess.Popen(
        [sys.executable, "-c", program], cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_raises_a_flag(number):
    child = start(WAITING.format(linger=0))
    child.send_signal(number)
    assert end(child) == (40 + number, "")


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (signal.SIGINT, signal.SIGINT, 130),  # twice Ctrl-C: at once
        (signal.SIGINT, signal.SIGTERM, 130),  # the same under torchrun
        (signal.SIGTERM, signal.SIGTERM, 40 + signal.SIGTERM),  # a repeated SIGTERM stays graceful
    ],
)
def test_a_second_signal(first, second, code):
    child = start(WAITING.format(linger=1.5))
    child.send_signal(first)
    time.sleep(0.5)
    child.send_signal(second)
    assert end(child)[0] == code


def test_the_watcher_leaves_when_the_loop_cannot_come():
    child = start(BLOCKED, patience=4)
    begun = time.monotonic()
    child.send_signal(signal.SIGTERM)
    code, errors = end(child)
    assert code == 143 and "leaving without saving" in errors and "Thread" in errors, "with the stacks"
    assert time.monotonic() - begun < 20


def test_handlers_are_put_back():
    program = (
        "import signal\nfrom trainer.interrupts import Interrupts\nbefore = signal.getsignal(signal.SIGTERM)\n"
        "with Interrupts():\n    assert signal.getsignal(signal.SIGTERM) != before\n"
        "assert signal.getsignal(signal.SIGTERM) == before\n"
        "import threading\nassert threading.active_count() == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, timeout=20, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

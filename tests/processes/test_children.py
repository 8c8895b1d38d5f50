"""Commands that are started: they end with their block, and with the process that began it."""

import os
import signal
import subprocess
import sys

import pytest

from tests.command_line import alive, python, within
from trainer.errors import SetupError
from trainer.processes import family
from trainer.processes.family import PARENT

ENDLESS = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(1000)"]


def interrupted(leaves=None, before=0):
    """How an endless command ends when Ctrl-C comes, and another signal `before` it."""
    with pytest.raises(KeyboardInterrupt), family.started(ENDLESS, leaves, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(before)
        raise KeyboardInterrupt
    child.stdout.close()
    return child.returncode


def test_ctrl_c_is_passed_on_and_waited_for():
    assert interrupted(lambda child: child.wait(60)) == -signal.SIGINT


def test_ctrl_c_kills_what_is_not_to_leave_by_itself():
    assert interrupted() == interrupted(lambda child: None, signal.SIGSTOP) == -signal.SIGKILL


def test_a_block_that_fails_ends_what_it_started():
    with pytest.raises(ZeroDivisionError), family.started(ENDLESS, stdout=subprocess.DEVNULL) as child:
        raise ZeroDivisionError
    assert child.returncode == -signal.SIGKILL


def test_it_has_a_session_and_is_told_whose_it_is():
    script = f"import os; print(os.getsid(0) == os.getpid(), os.environ['{PARENT}'], os.environ.get('MINE'))"
    for given, mine in ((None, None), ({"MINE": "x"}, "x")):
        command = [sys.executable, "-c", script]
        with family.started(command, environment=given, stdout=subprocess.PIPE) as child:
            assert child.communicate()[0] == f"True {os.getpid()} {mine}\n"
        assert child.returncode == 0


def test_what_is_not_there_is_one_line():
    with pytest.raises(SetupError, match=r"^/not/here .*No such file"), family.started(["/not/here"]):
        pass


def test_it_dies_with_the_process_that_started_it():
    command = "from trainer.processes import family; family.die_with_parent(); print('ready', flush=True); input()"
    script = f"""
import os, subprocess, sys
from trainer.processes import family
with family.started([sys.executable, "-c", {command!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    print(child.stdout.readline().strip(), child.pid, flush=True)
    os.kill(os.getpid(), {signal.SIGKILL})
"""
    done = python("-c", script)
    ready, pid = done.stdout.split()
    assert (ready, done.returncode) == ("ready", -signal.SIGKILL)
    assert within(20, lambda: not alive(int(pid)))

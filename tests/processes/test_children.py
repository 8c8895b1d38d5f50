"""Commands that are started: they end with their block, and with the process that began it."""

import errno
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


def interrupted(before=0):
    """Return how an endless command ends at Ctrl-C, with another signal `before` it."""
    with (
        pytest.raises(KeyboardInterrupt),
        family.run_command(ENDLESS, os.environ, stdout=subprocess.PIPE) as child,
    ):
        assert child.stdout.readline() == "ready\n"
        child.send_signal(before)
        raise KeyboardInterrupt
    child.stdout.close()
    return child.returncode


def test_ctrl_c_kills_started_processes():
    assert interrupted() == interrupted(signal.SIGSTOP) == -signal.SIGKILL


def test_a_block_that_fails_ends_what_it_started():
    with (
        pytest.raises(ZeroDivisionError),
        family.run_command(ENDLESS, os.environ, stdout=subprocess.DEVNULL) as child,
    ):
        raise ZeroDivisionError
    assert child.returncode == -signal.SIGKILL


def test_a_child_has_its_own_session_and_its_parents_id():
    script = (
        f"import os; print(os.getsid(0) == os.getpid(), os.environ['{PARENT}'], "
        "os.environ.get('MINE'))"
    )
    for argument, own in (({}, None), ({"MINE": "x"}, "x")):
        command = [sys.executable, "-c", script]
        with family.run_command(command, environment=argument, stdout=subprocess.PIPE) as child:
            assert child.communicate()[0] == f"True {os.getpid()} {own}\n"
        assert child.returncode == 0


def test_a_missing_program_is_one_line():
    with (
        pytest.raises(SetupError, match=f"^/not/here .*{os.strerror(errno.ENOENT)}"),
        family.run_command(["/not/here"], os.environ),
    ):
        pass


def test_a_child_dies_with_the_process_that_started_it():
    command = (
        "from trainer.processes import family; family.die_with_parent(); "
        "print('ready', flush=True); input()"
    )
    script = f"""
import os, subprocess, sys
from trainer.processes import family
command, pipe = [sys.executable, "-c", {command!r}], subprocess.PIPE
with family.run_command(command, os.environ, stdin=pipe, stdout=pipe) as child:
    print(child.stdout.readline().strip(), child.pid, flush=True)
    os.kill(os.getpid(), {signal.SIGKILL})
"""
    completed = python("-c", script)
    ready, pid = completed.stdout.split()
    assert (ready, completed.returncode) == ("ready", -signal.SIGKILL)
    assert within(20, lambda: not alive(int(pid)))

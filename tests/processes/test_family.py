"""Processes that ask to die with another process."""

import os
import shlex
import subprocess
import sys

import pytest

from tests.command_line import PROJECT, environment, python
from trainer.processes.family import PARENT, PARENT_DIED

ASKS = "from trainer.processes import family; family.die_with_parent(); print('alive')"


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({}, 0),  # a user's own command
        ({PARENT: str(os.getpid())}, 0),
        ({PARENT: "1"}, PARENT_DIED),  # The process that started it has ended.
        ({"RANK": "0", "WORLD_SIZE": "1"}, 0),  # under a torchrun, whichever
    ],
)
def test_who_is_a_parent(variables, code):
    completed = python("-c", ASKS, env=environment(**variables))
    assert (completed.returncode, completed.stdout) == (code, "" if code else "alive\n")


RANK = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
WAITS = "import os, time\nparent = os.getppid()\nprint('here', flush=True)\n"
WAITS += "while os.getppid() == parent:\n    time.sleep(0.01)\n"


def test_an_orphan_leaves_though_its_torchrun_died_before_it_asked():
    """Whoever adopted it is no torchrun."""
    starts = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', "
        "sys.argv[1]], stdout=1); input()"
    )
    command = [sys.executable, "-c", starts, f"{WAITS}{ASKS}"]
    pipe = subprocess.PIPE
    torchrun = subprocess.Popen(
        command,
        cwd=PROJECT,
        env=environment(**RANK),
        stdin=pipe,
        stdout=pipe,
        text=True,
    )
    assert torchrun.stdout.readline() == "here\n"
    torchrun.kill()
    assert torchrun.communicate(timeout=60)[0] == ""


def test_a_rank_stays_where_a_command_is_between_it_and_a_living_torchrun():
    launcher = ["sh", "-c", f"{shlex.join([sys.executable, '-c', ASKS])}; true"]
    completed = subprocess.run(
        launcher, cwd=PROJECT, env=environment(**RANK), capture_output=True, timeout=60
    )
    assert completed.stdout == b"alive\n"

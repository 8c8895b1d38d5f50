"""Who dies with whom, in processes that ask for it."""

import os
import subprocess
import sys

import pytest

from tests.commands import PROJECT, environment
from trainer.processes.family import PARENT, PARENT_DIED

ASKS = "from trainer.processes import family; family.die_with_parent(); print('alive')"


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({}, 0),  # a user's own command
        ({PARENT: str(os.getpid())}, 0),
        ({PARENT: "1"}, PARENT_DIED),  # who started it is gone already
        ({"RANK": "0", "WORLD_SIZE": "1"}, 0),  # under a torchrun, whichever
    ],
)
def test_who_is_a_parent(variables, code):
    command = [sys.executable, "-c", ASKS]
    done = subprocess.run(command, cwd=PROJECT, env=environment(**variables), capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, b"" if code else b"alive\n")

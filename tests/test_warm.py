"""The process that runs the tests' commands, where it cannot."""

import os
import signal
import subprocess

import pytest

from tests.commands import environment
from tests.warm import Warm


def test_a_server_that_is_not_up_in_time_is_told_as_such(tmp_path):
    server = Warm(environment())
    try:
        os.kill(server._process.pid, signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            server.run(["version"], environment(), str(tmp_path), 1, 2, 0.2)
    finally:
        server._process.kill()
        server._process.wait()
        server._ours.close()

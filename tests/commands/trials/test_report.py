"""Other programs beside a comparison."""

import subprocess
import sys
import time

import pytest

from trainer.commands.trials.report import Others, busy_line


def test_other_programs_are_noticed():
    """A child that is still running is another program: only ended ones are known to be ours."""
    others = Others()
    if others.cores() is None:
        pytest.skip("the kernel does not tell, or this process may use only a part of the cores")
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        time.sleep(1)
        seen = others.cores()
        spinning.kill()
    assert seen > 0.3 and "other programs kept" in busy_line(seen)[0] and busy_line(0.1) == busy_line(None) == []

"""Seconds for which other ranks are silent: those in which a thread is idle although its process is
awake.
"""

from __future__ import annotations

import re
import subprocess
import threading
import time

import pytest

from tests.command_line import python
from trainer.errors import PeerError
from trainer.processes import silence


def looked_at(work, looks=8):
    """Return whether a silent thread is given up within some checks, if three are too many."""
    waits = []

    def run():
        waits.append(silence.Wait(2.5, print))
        work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not waits:
        time.sleep(0.01)
    for _ in range(looks):
        time.sleep(0.1)
        waits[0].check(1.0)
    return waits[0].is_over


def test_a_sleeping_rank_is_given_up_and_a_working_one_is_not():
    ended = []

    def works():
        while not ended:
            sum(range(1000))

    assert looked_at(lambda: time.sleep(30))
    assert not looked_at(works)
    ended.append(True)


def test_a_rank_that_waits_for_another_process_is_not_given_up():
    """The other process may be a compiler."""
    assert not looked_at(lambda: subprocess.run(["sleep", "3"], check=False))


def test_outside_of_a_group_nothing_is_watched(monkeypatch):
    monkeypatch.setattr(silence, "_limits", [])
    assert silence.begin_wait(None, print) is None and silence.end_wait(None) is None
    monkeypatch.setattr(silence, "_limits", [7.0])
    wait = silence.begin_wait(None, print)
    longer = silence.begin_wait(9.0, print)
    assert (wait.limit, longer.limit) == (7.0, 9.0)
    longer.is_over = True
    assert silence.end_wait(wait) is None and silence.end_wait(longer) == 9.0


@pytest.mark.slow
def test_a_rank_leaves_where_gloo_raises_nothing():
    """As for a connection to another node that was closed between two operations."""
    program = "import time; from trainer.distributed import peers\n"
    program += "from trainer.processes import silence; silence.set_limit(1.0)\n"
    program += "with peers.translate_peer_errors(): time.sleep(600)"
    completed = python("-c", program, timeout=120)
    assert completed.returncode == PeerError.code
    assert re.search(r"rank 0: .*`timeout`.*\b1000 ms\b.*timeout=$", completed.stderr, re.M)
    # The stacks.
    assert re.search(r'^  File ".+", line \d+', completed.stderr, re.MULTILINE)

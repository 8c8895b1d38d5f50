"""Seconds for which other ranks are silent: of a thread that does nothing, while its process is awake."""

from __future__ import annotations

import subprocess
import threading
import time

import pytest

from tests.command_line import python
from trainer.errors import PeerError
from trainer.processes import silence


def looked_at(work, looks=8):
    """Whether a thread that does this is given up within some looks, of which three are too many."""
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
        waits[0].look(1.0)
    return waits[0].over


def test_who_sleeps_is_given_up_and_who_works_is_not():
    ended = []

    def works():
        while not ended:
            sum(range(1000))

    assert looked_at(lambda: time.sleep(30))
    assert not looked_at(works)
    ended.append(True)


def test_who_waits_for_another_process_is_not_given_up():
    """A compiler, say."""
    assert not looked_at(lambda: subprocess.run(["sleep", "3"], check=False))


def test_outside_of_a_group_nothing_is_watched(monkeypatch):
    monkeypatch.setattr(silence, "_limits", [])
    assert silence.begin(None, print) is None and silence.end(None) is None
    monkeypatch.setattr(silence, "_limits", [7.0])
    wait, longer = silence.begin(None, print), silence.begin(9.0, print)
    assert (wait.limit, longer.limit) == (7.0, 9.0)
    longer.over = True
    assert silence.end(wait) is None and silence.end(longer) == 9.0


@pytest.mark.slow
def test_a_rank_leaves_where_gloo_raises_nothing():
    """As for a connection to another node that was closed between two operations."""
    program = "import time; from trainer.processes import peers, silence; silence.watch(1.0)\n"
    program += "with peers.lost_peers(): time.sleep(600)"
    done = python("-c", program, timeout=120)
    assert done.returncode == PeerError.code
    assert "lost another rank" in done.stderr and "timed out after 1000 ms" in done.stderr
    assert "Current thread" in done.stderr or "most recent call first" in done.stderr  # the stacks

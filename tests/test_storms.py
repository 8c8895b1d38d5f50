"""Whole jobs under kills, signals and stops; `python -m tests.storms` runs longer ones."""

from __future__ import annotations

import random

import pytest

from tests import warm
from tests.storms import MODES, SEVERAL, SIGNALS, TIMEOUT, WORDS, Job, Storms, strike

SEED = 1


@pytest.fixture(scope="module")
def storms(tmp_path_factory):
    return Storms(tmp_path_factory.mktemp("storms"), SEED)


@pytest.mark.parametrize(
    ("kinds", "count", "modes"),
    [(("kill",), 40, [*MODES]), (SIGNALS, 60, [*MODES]), (("stop",), 20, SEVERAL)],
    ids=["kills", "signals", "stops"],
)
@pytest.mark.full("120 hits, a quarter of an hour")
def test_nothing_is_lost(storms, kinds, count, modes):
    assert len(storms.run(kinds, count, modes)) == count


def test_a_stopped_rank_is_named_in_time(tmp_path):
    """The others wait `timeout` seconds; torchrun alone would wait thirty more for a process that cannot hear it."""
    job = Job(tmp_path / "run", *WORDS, *MODES["ddp"], f"timeout={TIMEOUT}", start=warm.Popen)
    try:
        assert strike(job, "stop", "steps", random.Random(SEED))
    finally:
        job.clear()

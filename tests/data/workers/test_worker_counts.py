"""How many workers there are: from cores, ranks and shared memory; and what the search finds at any pace."""

import math

import pytest
import torch

from trainer.data.loaders import MORE, worker_search
from trainer.data.workers import worker_counts
from trainer.data.workers.worker_counts import Search, allowed, conditions, slots
from trainer.errors import SetupError
from trainer.recipe import load

MIB = 2**20
CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch):
    """So many cores, and bytes of shared memory."""

    def made(cores, free):
        monkeypatch.setattr(worker_counts, "cores", lambda: cores)
        monkeypatch.setattr(worker_counts, "free_shared_memory", lambda folder="": free)

    return made


@pytest.mark.parametrize(
    ("cores", "readers", "free", "batch", "wanted"),
    [
        (64, 1, 1 << 40, MIB, 64),  # more than eight
        (64, 8, 1 << 40, MIB, 8),
        (2, 4, 1 << 40, MIB, 1),
        (64, 1, 64 * MIB, MIB, 15),  # 31 slots are 31 of 32 MiB
        (64, 2, 64 * MIB, MIB, 7),
        (64, 1, 64 * MIB, 38 * MIB, 1),
        (4, 1, None, MIB, 4),
        (4, 1, MIB, 0, 4),
    ],
)
def test_a_worker_a_core_as_far_as_shared_memory_reaches(machine, cores, readers, free, batch, wanted):
    machine(cores, free)
    assert allowed(readers, batch) == wanted
    if free and batch < free:
        assert wanted == 1 or slots(wanted) * readers * batch <= free / 2


def searched(words, found=None, readers=1, batch=MIB):
    return worker_search(load(None, *words), readers, batch, CPU, found or {})


def test_what_the_recipe_says_is_what_there_is(machine):
    machine(16, 1 << 40)
    for words, count, settled in (
        ([], 16, True),
        (["data.workers=3"], 3, True),
        (["data.workers=0"], 0, True),
        (["data.workers=auto"], 16, False),
    ):
        search = searched(words)
        assert (search.count, search.settled) == (count, settled)
    assert searched(["data.workers=auto"]).most == MORE * 16


def test_what_was_found_holds_for_such_a_machine(machine):
    machine(16, 1 << 40)
    auto = ["data.workers=auto"]
    kept = {"count": 5, **conditions(1, CPU, load(None, *auto))}
    assert searched(auto, kept).count == 5 and searched(auto, kept).settled
    assert searched([], kept).count == 16 and searched(["data.workers=2"], kept).count == 2
    others = {"cores": 4, "readers": 2, "count": "5", "device": "cuda", "mode": "dp", "root": "/x", "cache": "ram"}
    for other in (*({**kept, key: value} for key, value in others.items()), {**kept, "count": 99}, {}):
        assert not searched(auto, other).settled


def test_workers_that_do_not_fit_are_refused(machine):
    machine(16, 64 * MIB)
    assert searched([]).count == 15
    with pytest.raises(SetupError, match=r"\b65 MiB .*data\.workers=0"):
        searched(["data.workers=32"])
    with pytest.raises(SetupError, match="need 300 MiB"):
        searched([], batch=100 * MIB)
    assert searched(["data.workers=0"], batch=100 * MIB).count == 0


class Rank:
    """Trains with a batch every `step` seconds; one takes a worker `read` seconds, of which `cores` read at a time."""

    def __init__(self, step, read, cores=math.inf):
        self.step, self.read, self.cores, self.now = step, read, cores, 0.0

    def trains(self, search, batches=5000):
        """Counts that there were, without repeats."""
        counts = [search.count]
        for _ in range(batches):
            pace = max(self.step, self.read / min(search.count, self.cores))
            search.waited += pace - self.step
            search.read += self.read
            self.now += pace
            search.batch()
            counts += [search.count] if search.count != counts[-1] else []
        return counts


@pytest.mark.parametrize(
    ("step", "read", "cores", "counts"),
    [
        (0.1, 0.01, 16, [16, 1]),  # a tenth of a worker is enough
        (0.1, 0.39, 16, [16, 5]),  # four are, and one to spare
        (0.01, 0.155, 16, [16]),
        (0.01, 0.3, 16, [16, 24, 16]),  # more than cores do not help
        (0.01, 0.3, math.inf, [16, 24, 32]),  # more do, as all wait for a disk
        (0.01, 10.0, math.inf, [16, 24, 32]),  # as many as there may be
    ],
)
def test_as_many_as_are_needed_are_found_once(step, read, cores, counts):
    rank = Rank(step, read, cores)
    search = Search(16, 32, clock=lambda: rank.now)
    assert rank.trains(search) == counts and search.settled


def test_batches_that_were_read_before_and_gaps_tell_nothing():
    rank = Rank(0.1, 0.29)
    search = Search(4, 8, clock=lambda: rank.now)
    for _ in range(9):  # in memory already
        search.batch()
    epochs = 0  # of a few steps
    while not search.settled and epochs < 20:
        epochs += 1
        search.pause()
        search.waited += 500
        search.read += 300
        rank.now += 1000  # an evaluation
        assert rank.trains(search, 4) == [4]
    assert 8 <= epochs < 20


def test_files_that_may_be_open_bound_it(machine, monkeypatch):
    machine(208, 1 << 40)
    for limit, count in ((1024, 64), (10**6, 208), (-1, 208), (8, 1)):
        monkeypatch.setattr(worker_counts.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert allowed(1, MIB) == count


@pytest.mark.parametrize("read", [0.36, 0.8])
def test_a_checkpoint_or_a_stop_within_a_stretch_settles_nothing(read):
    plain, rank = Rank(0.1, read), Rank(0.1, read)
    for one, pause in ((plain, 0), (rank, 15)):
        one.search = Search(8, 16, clock=lambda one=one: one.now)
        one.trains(one.search, 20)
        one.now += pause
        one.trains(one.search)
    assert rank.search.settled and rank.search.count == plain.search.count


def test_a_number_that_was_asked_for_stays():
    rank = Rank(0.1, 10.0)
    assert rank.trains(Search(3, clock=lambda: rank.now)) == [3]

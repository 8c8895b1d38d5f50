"""How many workers there are: from cores, ranks and shared memory."""

import pytest

from trainer.data.loaders import count_workers
from trainer.data.workers import worker_counts
from trainer.data.workers.worker_counts import allowed, slots
from trainer.errors import SetupError
from trainer.memory import device
from trainer.memory.device import check_shared_memory
from trainer.recipe import load

MIB = 2**20


@pytest.fixture
def machine(monkeypatch):
    """Simulate a number of cores and a size of shared memory in bytes."""

    def made(cores, free):
        monkeypatch.setattr(worker_counts, "count_cores", lambda: cores)
        for module in (worker_counts, device):
            monkeypatch.setattr(module, "free_shared_memory", lambda: free)

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
def test_a_worker_a_core_as_far_as_shared_memory_reaches(
    machine, cores, readers, free, batch, wanted
):
    machine(cores, free)
    assert allowed(readers, batch) == wanted
    if free and batch < free:
        assert wanted == 1 or slots(wanted) * readers * batch <= free / 2


def test_files_that_may_be_open_bound_it(machine, monkeypatch):
    machine(208, 1 << 40)
    for limit, count in (
        (1024, 64),
        (10**6, 208),
        (-1, 208),
        (8, 1),
    ):
        monkeypatch.setattr(
            worker_counts.resource, "getrlimit", lambda _, limit=limit: (limit, limit)
        )
        assert allowed(1, MIB) == count


def counted(*words, batch=MIB):
    return count_workers(load(None, *words), 1, batch)


def test_the_recipes_number_of_workers_is_used_if_it_fits(machine):
    machine(16, 1 << 40)
    assert [counted(), counted("data.workers=3"), counted("data.workers=0")] == [16, 3, 0]
    machine(16, 64 * MIB)
    assert counted() == 15 and counted("data.workers=0", batch=100 * MIB) == 0
    with pytest.raises(SetupError, match=r"\b65 MiB .*data\.workers=0"):
        counted("data.workers=32")
    with pytest.raises(SetupError, match="need 300 MiB"):
        counted(batch=100 * MIB)


def test_too_little_shared_memory_is_refused_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "SHARED_MEMORY", str(tmp_path))
    with pytest.raises(SetupError, match=r"workers=0.* --shm-size=\d+g"):
        check_shared_memory(2**60)
    check_shared_memory(1)
    monkeypatch.setattr(device, "SHARED_MEMORY", "/not/here")
    check_shared_memory(2**60)

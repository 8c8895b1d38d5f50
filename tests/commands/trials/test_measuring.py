"""Processes that measure at the same time: their answers, and the name of the one that fails."""

import time

import pytest
import torch
import torch.distributed as dist

from trainer.commands.trials.measuring import measure_on_all
from trainer.errors import PeerError


def late(here):
    """Let the first rank wait for no other rank and work for a long time."""
    if here.rank == 1:
        raise ValueError("rank 1 is odd")
    time.sleep(100)


def summed(here, odd=None):
    """The sum of all ranks; one of them may raise instead."""
    if here.rank == odd:
        raise ValueError(f"rank {odd} is odd")
    total = torch.tensor(float(here.rank))
    dist.all_reduce(total)
    return total.item(), torch.get_num_threads(), str(here.device)


@pytest.mark.slow
def test_processes_meet_and_answer_and_a_failing_one_is_named(tmp_path):
    assert (
        measure_on_all(
            summed,
            ["cpu"] * 3,
            1,
            tmp_path / "sums",
        )
        == [(3.0, 1, "cpu")] * 3
    )
    for odd in (0, 1):
        with pytest.raises(PeerError, match=f"rank {odd} is odd"):
            measure_on_all(summed, ["cpu"] * 2, 1, tmp_path / "sums", odd=odd)
    with pytest.raises(PeerError, match="rank 1 is odd"):
        measure_on_all(late, ["cpu"] * 2, 1, tmp_path / "late", timeout=50)

"""Processes that measure at once: what they answer, and whose fault is told."""

import time

import pytest
import torch
import torch.distributed as dist

from trainer.commands.trials.measuring import answers
from trainer.errors import PeerError


def late(here):
    """The first rank waits for nobody, and works for long."""
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
def test_each_answers_and_meets_the_others_and_one_that_fails_is_told(tmp_path):
    assert answers(summed, ["cpu"] * 3, 1, tmp_path / "sums") == [(3.0, 1, "cpu")] * 3
    for odd in (0, 1):
        with pytest.raises(PeerError, match=f"rank {odd} is odd"):
            answers(summed, ["cpu"] * 2, 1, tmp_path / "sums", odd=odd)
    with pytest.raises(PeerError, match="rank 1 is odd"):
        answers(late, ["cpu"] * 2, 1, tmp_path / "late", timeout=50)

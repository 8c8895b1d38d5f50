"""Patterns by which a lost, doubled or shifted element shows, in each type and among many ranks."""

from __future__ import annotations

import pytest
import torch

from trainer.commands.prove.prove_probe import SIZES, compare, pattern, types

KINDS = [*types(torch.device("cpu")), torch.float16, torch.bfloat16]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("among", [1, 2, 8])
def test_sums_are_exact_and_tell_ranks_and_neighbours_apart(kind, among):
    parts = [pattern(1023, kind, rank, among) for rank in range(among)]
    total = sum(part.double() for part in parts)
    assert torch.equal(total.to(kind).double(), total), "the sum can be held exactly"
    assert len({tuple(part.tolist()) for part in parts}) == among, "each rank's is another"
    for other in (total.roll(1), total.roll(7), total + parts[0].double(), total - parts[-1].double()):
        assert compare(other.to(kind), total.to(kind), "it", bad := []) == 1 and len(bad) == 1
    damaged = total.clone()
    damaged[500] = damaged[499]
    assert compare(damaged.to(kind), total.to(kind), "it", bad := []) and "element 500 is" in bad[0]
    assert compare(total.to(kind), total.to(kind), "it", bad := []) and bad == []


def test_messages_are_of_one_element_and_of_more_than_a_buffer():
    assert min(SIZES) == 1 and max(SIZES) > 2**20 and any(size % 2 for size in SIZES)
    long = pattern(max(SIZES), torch.int64, 1, 1)
    assert len(long.unique()) > 2**19

"""Checks that cards compute and copy correctly, on stubs: a failure is one line with a
suggestion.
"""

from __future__ import annotations

import pytest
import torch

from trainer.devices import health
from trainer.distributed import world_setup
from trainer.errors import DeviceMemoryError, SetupError
from trainer.processes import resources
from trainer.processes.rank import Place
from trainer.recipe import load

CUDA = [torch.device("cuda", index) for index in range(4)]


@pytest.fixture
def card(monkeypatch):
    def make(error=None, total=4096 * 4095 // 2):
        def arange(*_, **__):
            if error is not None:
                raise error
            return torch.tensor([total])

        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla P40")
        monkeypatch.setattr(torch, "arange", arange)

    return make


def test_a_card_that_does_not_compute(card):
    card(RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore\nlines"))
    with pytest.raises(SetupError, match=r"cuda:0 \(Tesla P40\) .*ECC.*\[cuda:1\]"):
        health.check_card(CUDA[0], 2)
    card(RuntimeError("CUDA error: out of memory"))
    with pytest.raises(DeviceMemoryError, match="cuda:0"):
        health.check_card(CUDA[0], 1)
    card(RuntimeError("CUDA error: no kernel image is available for execution on the device"))
    with pytest.raises(SetupError, match=r"torch \d.*no kernel image.*devices=\[cpu\]"):
        health.check_card(CUDA[0], 1)
    card()
    health.check_card(CUDA[0], 1)
    card(total=7)
    with pytest.raises(SetupError, match="computes wrongly"):
        health.check_card(CUDA[0], 1)


def test_every_way_between_cards_is_taken():
    assert health.list_copy_pairs(CUDA[:1]) == [] == health.list_copy_pairs([CUDA[0], CUDA[0]])
    assert set(health.list_copy_pairs(CUDA[:2])) == {(CUDA[0], CUDA[1]), (CUDA[1], CUDA[0])}
    ways = {(a.index, b.index) for a, b in health.list_copy_pairs(CUDA)}
    chain = [(0, 1), (1, 2), (2, 3)]
    star = [(0, 2), (0, 3)]
    assert ways == {way for a, b in chain + star for way in ((a, b), (b, a))}


def nothing(target, source, non_blocking=False):
    return target


def one_bit(target, source, non_blocking=False):
    target.add_(source)
    target[-1] ^= 1 << 20
    return target


@pytest.mark.parametrize("copy", [nothing, one_bit])
def test_a_copy_that_corrupts_is_found(monkeypatch, copy):
    here = torch.device("cpu")
    health.check_copies([(here, here)])
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    with pytest.raises(SetupError, match=r"\bcpu .*\bcpu\).*IOMMU.*NCCL_P2P_DISABLE=1 .*mode=ddp"):
        health.check_copies([(here, here)])


@pytest.mark.parametrize("words", [["mode=dp"], ["mode=split"], ["mode=pipeline"]])
def test_modes_of_one_process_try_their_copies_first(monkeypatch, words):
    """Copies from the second card to the first are wrong, and those in the other direction are
    right.
    """
    monkeypatch.setattr(resources, "count_cuda_devices", lambda *_: 2)
    monkeypatch.setattr(world_setup, "read_place", Place)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    checked = []
    monkeypatch.setattr(
        health, "check_card", lambda device, count: checked.append((str(device), count))
    )
    monkeypatch.setattr(
        health, "copies_correctly", lambda source, target, pattern: source == CUDA[0]
    )
    with pytest.raises(SetupError, match=r"\(cuda:1 to cuda:0\)"):
        world_setup.create_world(load(None, *words, "threads=2"))
    assert checked == [("cuda:0", 2), ("cuda:1", 2)]

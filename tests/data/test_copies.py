"""Batches on their way to a GPU, on simulated ones: no race, no memory given away, and nobody waits."""

import numpy as np
import pytest
import torch

from tests.simulated.simcuda import simulated
from trainer.data.copies import Copies
from trainer.data.feeds import LabelFeed, MemoryFeed
from trainer.data.sets import Datasets, ImageSet
from trainer.data.workers import PhotoFeed
from trainer.recipe import load

GPU = torch.device("cuda", 0)


class Pictures:
    def __len__(self):
        return 24

    def where(self, index):
        return str(index)

    def read(self, index, channels):
        return torch.full((channels, 16, 16), index, dtype=torch.uint8), index


def feed(kind, *words):
    recipe = load(None, "data.image_size=16", *words)
    pictures, labels = torch.arange(24, dtype=torch.uint8)[:, None, None, None], torch.arange(24)
    if kind == "labels":
        return LabelFeed(labels, 24, 4, GPU)
    if kind == "photos":
        sets = Datasets("mine", Pictures(), Pictures(), (), 3, 16, (0.5,) * 3, (0.5,) * 3, False, "")
        return PhotoFeed(Pictures(), sets, 4, recipe, 0, GPU)
    return MemoryFeed(ImageSet(pictures.expand(-1, 3, 16, 16), labels), 4, recipe.augment, 0, GPU, [])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("memory", ["augment.crop=pad", "augment.hflip=0.5"]),
        ("memory", ["augment.crop=resized"]),
        *[("memory", [f"augment.auto={policy}"]) for policy in ("trivial", "rand", "autoaugment")],
        ("labels", []),
        ("photos", []),
    ],
)
def test_batches_reach_a_gpu_in_order_and_without_waiting(kind, words):
    with simulated(1) as machine:
        batches = feed(kind, *words)
        machine.waits.seen.clear()
        seen = []
        for images, labels in batches.training(0, np.arange(24).reshape(6, 4)):
            seen.append(labels.clone())
            images.float().sum()
            labels = images = None
        for images, labels, _ in batches.evaluation([(0, 4), (20, 24)]):
            seen.append(labels.clone())
            images.float().sum()
        batches.close()
        assert dict(machine.waits.seen) == {}
        torch.cuda.synchronize()
        assert machine.errors == []
        assert torch.cat(seen).tolist() == [*range(24), *range(4), *range(20, 24)]


def test_a_copy_goes_past_the_computing_before_it():
    with simulated(1) as machine:
        copies, main = Copies(GPU), torch.cuda.current_stream()
        before = torch.ones(4, device=GPU) * 2
        event = main.record_event()
        copied = copies(torch.ones(4))
        assert not event.query() and copied.device == before.device
        assert (copied + before).tolist() == [3.0] * 4
        assert machine.errors == []


@pytest.mark.parametrize(("left_out", "wrong"), [("wait_stream", "RACE"), ("record_stream", "REUSE")])
def test_every_wait_is_needed(monkeypatch, left_out, wrong):
    with simulated(1) as machine:
        owner = torch.Tensor if left_out == "record_stream" else type(torch.cuda.current_stream())
        monkeypatch.setattr(owner, left_out, lambda *_: None)
        copies = Copies(GPU)
        for _ in range(3):
            copied = copies(torch.ones(4))
            copied + 1
            del copied
        assert any(error.startswith(wrong) for error in machine.errors), machine.errors
        monkeypatch.undo()

"""Small data sets and their loaders."""

import time

import numpy as np
import torch

from trainer.data import Datasets, open_datasets
from trainer.data.folders.targets import Targets
from trainer.data.registered import UserItems, registered
from trainer.data.sets import CLASS
from trainer.recipe import load
from trainer.tasks import Classification

CPU = torch.device("cpu")


AUGMENT = (
    "augment.crop=pad",
    "augment.hflip=0.5",
    "augment.auto=trivial",
    "augment.erase=0.5",
    "augment.mixup=0.2",
    "augment.cutmix=1.0",
)


class Items:
    """Photos whose pixels encode their index; some raise, hang, or end the worker."""

    def __init__(self, count, broken=(), hang=None):
        self.count = count
        self.broken = broken
        self.hang = hang

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index in self.broken:
            raise ValueError("damaged sample")
        if index == self.hang:
            time.sleep(1000)
        pixels = np.random.default_rng(index).integers(
            0,
            256,
            (3, 20, 30),
            dtype=np.uint8,
        )
        return torch.from_numpy(pixels), index


def sets_of(train, val, classes, size):
    names = tuple(map(str, range(classes)))
    return Datasets(
        "mine",
        train,
        val,
        names,
        3,
        size,
        (0.5,) * 3,
        (0.25,) * 3,
        False,
        "val",
    )


def photo_sets(train=24, val=7, size=16, **faults):
    names = tuple(map(str, range(1000)))
    sources = [
        UserItems(
            Items(count, **faults),
            "mine",
            Targets(Classification, names, CLASS),
            None,
            None,
        )
        for count in (train, val)
    ]
    return sets_of(*sources, max(train, val), size)


def epoch(loader, number=0, start=0):
    """Inputs and targets of an epoch's micro-batches, copied."""
    return [
        (batch.inputs.clone(), batch.targets.clone()) for batch in loader.training(number, start)
    ]


def becomes_true(condition, patience=60):
    deadline = time.monotonic() + patience
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def same(a, b):
    """Whether lists of batches, of tensors and counts each, are alike."""
    flat = [
        [part for batch in batches for part in map(torch.as_tensor, batch)] for batches in (a, b)
    ]
    return [*map(len, a)] == [*map(len, b)] and all(
        torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(*flat, strict=True)
    )


def opened(made, *words):
    """Return what a user's function returns, as a data set."""
    with registered.lent("mine", lambda data: made):
        return open_datasets(load(None, "data.name=mine", *words))

"""Functions and classes that the pools of the tests run.

Apart from the tests, so that a worker need not import pytest.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from trainer.errors import RecipeError
from trainer.pool import current_device


def square(item):
    return item * item


class Foresight:
    """A worker that inspects a batch while the previous one is computed; an item of 3 kills it."""

    def prepare(self, items):
        if 3 in items:
            kill_myself(0)
        return items

    def batch(self, items):
        time.sleep(0.01)
        return [-item for item in items]


def same(item):
    return item


def sleepy_square(item):
    time.sleep(((item * 7919) % 11) / 1000)
    return item * item


def sleep(seconds):
    time.sleep(seconds)
    return seconds


def slow_first(item):
    if item == 0:
        time.sleep(0.5)
    return item


def who(_=None, pause=0.0):
    time.sleep(pause)
    return os.getpid()


def where(_=None):
    return str(current_device()), current_device() == torch.device(str(current_device()))


def fail_at_three(item):
    if item == 3:
        raise ValueError("no threes")
    return item


def sparse(item):
    return torch.eye(3).to_sparse()


def unpicklable(item):
    return lambda: item


def doubled(tensor):
    return tensor.mul_(2)


def kill_myself(item):
    os.kill(os.getpid(), signal.SIGKILL)


def mark_and_die_once(folder):
    """Kills its worker the first time."""
    mark = Path(folder, "mark")
    if not mark.exists():
        mark.touch()
        kill_myself(folder)
    return "done"


class Classifier:
    """A model that was sent: its outputs for batches, and whether its weights are shared."""

    def __init__(self, model):
        self.model = model

    def setup(self, device):
        self.model = self.model.to(device).eval()

    @torch.inference_mode()
    def batch(self, items):
        return self.model(torch.stack(items).to(current_device()))


class Numbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(10, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 5),
        )

    def forward(self, inputs):
        return self.layers(inputs)


class Hanging(Classifier):
    """A worker that refuses batches with a NaN, and sleeps for ever at its first item of
    infinities.
    """

    def __init__(self, model, folder):
        super().__init__(model)
        self.folder = folder

    def batch(self, items):
        for item in items:
            mark = Path(self.folder, f"hung-{item[1].item():.0f}")
            if item[0].isinf() and not mark.exists():
                mark.touch()
                time.sleep(1000)
        if any(item.isnan().any() for item in items):
            raise ValueError("poisoned")
        time.sleep(0.002)
        return super().batch([item.nan_to_num(posinf=1.0) for item in items])


class TooFew:
    def batch(self, items):
        return items[1:]


class Slow:
    """A function whose first call is slow."""

    def __init__(self, folder, seconds):
        self.folder = folder
        self.seconds = seconds

    def setup(self, device):
        try:
            Path(self.folder, "slow").mkdir()
        except FileExistsError:
            self.seconds = 0.0

    def __call__(self, item):
        time.sleep(self.seconds)
        return item * item


def mathematics(item):
    """Start threads of OpenMP and of BLAS."""
    images = torch.ones(4, 8, 32, 32)
    square = np.ones((300, 300))
    total = (
        torch.einsum("bchw,bchw->b", images, images).sum()
        + (torch.ones(300, 300) @ torch.ones(300, 300)).sum()
    )
    return float(
        total
        + torch.conv2d(images, torch.ones(8, 8, 3, 3)).sum()
        + np.dot(square, square).sum()
        + item
    )


def draw(_):
    time.sleep(0.05)
    return float(np.random.rand())


class Whole:
    def batch(self, items):
        return {"sum": sum(items)}


class OutOfMemory:
    """A worker that can compute at most two items."""

    def batch(self, items):
        if len(items) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return [len(items)] * len(items)


class BrokenSetup:
    def setup(self, device):
        raise FileNotFoundError("no weights")

    def __call__(self, item):
        return item


class RefusedSetup(BrokenSetup):
    def setup(self, device):
        raise RecipeError("type devices=[cpu]")


class DeadSetup(BrokenSetup):
    def setup(self, device):
        kill_myself(device)


class Changing:
    """Writes to its arguments."""

    def __init__(self, weights):
        self.weights = weights

    def __call__(self, item):
        self.weights += 1
        return self.weights.sum().item()


class Picky(Exception):
    """A worker that cannot be rebuilt from its arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def on_device(shape):
    return {"a": torch.ones(shape, device=current_device())}


class Sums:
    def batch(self, items):
        return torch.stack(items).sum(1)


class Logged:
    """Fails at 5, and writes down what it is called with."""

    def __init__(self, log):
        self.log = log

    def batch(self, items):
        with open(self.log, "a") as file:
            print(*items, file=file)
        if 5 in items:
            raise ValueError("no fives")
        return items


class Plain(BaseException):
    pass


ENDS = {
    "sys.exit": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "BaseException": Plain("mine"),
}


class Quits:
    """A worker that ends the process that pickles or rebuilds it, in the way `how`.

    A `pid` of 0 means this process only.
    """

    def __init__(self, how, stage, pid=0):
        self.how = how
        self.stage = stage
        self.pid = pid

    def __reduce__(self):
        if self.stage == "pickling" and self.pid != os.getpid():
            raise ENDS[self.how]
        return made_anew, (self.how, self.stage, self.pid)


def made_anew(how, stage, pid):
    if stage == "unpickling" and pid != os.getpid():
        raise ENDS[how]
    return Quits(how, stage, pid)


def quits_at_three(item, how, stage):
    return (
        Quits(
            how,
            stage,
            os.getpid() if stage == "unpickling" else 0,
        )
        if item == 3
        else item
    )


class QuitsAtThree:
    def __init__(self, how, stage):
        self.how = how
        self.stage = stage

    def batch(self, items):
        return [quits_at_three(item, self.how, self.stage) for item in items]


class Coded(Exception):
    """An exception with more information than its text."""

    def __init__(self, text, code=7, detail="more"):
        super().__init__(text)
        self.code = code
        self.detail = detail


def throw(name):
    match name:
        case "missing":
            os.stat("/nowhere/at all")
        case "coded":
            raise Coded("mine", 3)
        case "stop":
            next(iter(()))
        case "picky":
            raise Picky(1, 2)
        case "exit":
            raise SystemExit(3)
    return name


def kill_at_three(item):
    if item == 3:
        kill_myself(item)
    return item

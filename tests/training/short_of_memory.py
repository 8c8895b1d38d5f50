"""A plugin: a model with BatchNorm and dropout, and one without, on a full device, for passes of
more than FAULTY_ROWS images after FAULTY_AFTER of them; with FAULTY_IN=step once, in the
optimizer's step. FAULTY_RANK is the rank that it happens to.
"""

import os

import torch
from torch import nn

from trainer import register_model
from trainer.models import small

ROWS = int(os.environ.get("FAULTY_ROWS", 8))
AFTER = int(os.environ.get("FAULTY_AFTER", 0))
HERE = os.environ.get("FAULTY_RANK", "0") == os.environ.get("RANK", "0")
passes = 0


def full():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB")


class Short(nn.Module):
    def __init__(self, model, dropout):
        super().__init__()
        self.model, self.dropout = model, nn.Dropout(dropout)

    def forward(self, x):
        global passes
        out = self.dropout(self.model(x))
        passes += torch.is_grad_enabled() and len(x) > ROWS
        if (
            HERE
            and torch.is_grad_enabled()
            and passes > AFTER
            and len(x) > ROWS
            and "FAULTY_IN" not in os.environ
        ):
            full()
        return out


@register_model("short")
def short(classes, channels, size):
    return Short(small.SMALL["cnn"](classes, channels, size), 0.1)


@register_model("short_plain")
def short_plain(classes, channels, size):
    return Short(small.SMALL["cnn_gn"](classes, channels, size), 0.0)


if os.environ.get("FAULTY_IN") == "step":
    from trainer.optim.optimization import Updater

    plain = Updater.step
    steps = 0

    def step(*given):
        global steps
        norm = plain(*given)
        steps += 1
        if steps == AFTER:
            full()
        return norm

    Updater.step = step
